"""The manifests say what the server understands, and their numbers fit one another."""

import json
import re
from pathlib import Path

import yaml

from async_engine import cli

DEPLOY = Path(__file__).parents[2] / "clients" / "deploy"
SERVICE, DEPLOYMENT, BUDGET = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def serve(arguments):
    return cli.make_parser().parse_args(["serve", *arguments])


def serve_parser():
    (commands,) = [action for action in cli.make_parser()._actions if action.dest == "command"]
    return commands.choices["serve"]


def test_flags_are_known_and_ports_are_those_of_probes_and_service():
    options = serve(CONTAINER["args"])
    port = int(options.listen.rpartition(":")[2])
    assert CONTAINER["startupProbe"]["grpc"]["port"] == CONTAINER["readinessProbe"]["grpc"]["port"] == port
    assert SERVICE["spec"]["ports"][0]["port"] == port
    ports = {each["name"]: each["containerPort"] for each in CONTAINER["ports"]}
    assert ports == {"grpc": port, "metrics": int(options.metrics_listen.rpartition(":")[2])}
    assert DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])
    assert options.admin_listen.startswith("127.0.0.1:"), "operators' service is for the pod alone"


def test_a_pod_has_the_time_to_drain():
    pause = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause + serve(CONTAINER["args"]).drain_timeout + 10 < POD["terminationGracePeriodSeconds"]
    assert BUDGET["spec"]["minAvailable"] < DEPLOYMENT["spec"]["replicas"]


def test_selectors_meet():
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    for selector in (
        SERVICE["spec"]["selector"],
        DEPLOYMENT["spec"]["selector"]["matchLabels"],
        BUDGET["spec"]["selector"]["matchLabels"],
    ):
        assert selector == labels
    assert SERVICE["spec"]["clusterIP"] == "None", "clients balance by the addresses of all pods"


def test_the_image_starts_the_server():
    text = (DEPLOY / "Dockerfile").read_text()
    entry, command = (json.loads(re.search(rf"^{name} (.*)$", text, re.MULTILINE)[1]) for name in ("ENTRYPOINT", "CMD"))
    assert entry == ["tailrace", "serve"]
    options = serve(command)
    exposed = re.search(r"^EXPOSE (.*)$", text, re.MULTILINE)[1].split()
    assert exposed == [address.rpartition(":")[2] for address in (options.listen, options.metrics_listen)]
    assert "USER tailrace" in text


def test_flags_that_the_page_names_are_known():
    named = set(re.findall(r"`(--[a-z-]+)`", (DEPLOY / "README.md").read_text()))
    known = {flag for action in serve_parser()._actions for flag in action.option_strings}
    assert len(named) > 10
    assert named <= known
