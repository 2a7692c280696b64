"""The soak in its shortest form."""

import json

from tests.bench import soak


def test_twenty_seconds_of_random_clients_leave_nothing_behind(capsys):
    # So early the allocators are still warming up: the bound on memory is for longer runs.
    code = soak.main(["--seconds", "20", "--seed", "1", "--clients", "8", "--max-growth", "0.2"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0, report["failures"]
    assert report["audited_streams"] > 50
    assert len(report["requests"]) >= 8
