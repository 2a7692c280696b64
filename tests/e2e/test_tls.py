"""TLS and mTLS: who may connect, certificates that are replaced under a server, and files of no use."""

import asyncio
import logging
import socket
import ssl
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import InvalidRequestError, StartupError
from protos.server_config import ServerOptions
from protos.tailrace.v1 import generation_pb2 as pb
from protos.tailrace.v1 import generation_pb2_grpc
from tailrace_client import AsyncClient, Client, Tls, UnavailableError
from tests.certificates import Authority, encrypted
from tests.e2e.serving import ROOT, ServerProcess, run, serving


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def server_options(authority, **more):
    cert, key = authority.issue("server")
    return {"tls_cert": str(cert), "tls_key": str(key)} | more


def common_name(address, ca):
    """What the server that listens there shows to a new connection: the serial number of its certificate."""
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port))) as connection,
        context.wrap_socket(connection, server_hostname=host) as secured,
    ):
        return secured.getpeercert()["serialNumber"]


async def ask(kind, address, **options):
    """The text of a short answer, by either client."""

    def ask_sync():
        with Client(address, resume=None, **options) as client:
            return client.complete("hi", max_tokens=4, seed=1, timeout=20).text

    if kind == "sync":
        return await asyncio.to_thread(ask_sync)
    async with AsyncClient(address, resume=None, **options) as client, client.generate("hi", max_tokens=4) as stream:
        return await stream.text()


async def is_refused(kind, address, **options):
    with pytest.raises(UnavailableError):
        await ask(kind, address, **options)


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_tls_serves_who_trusts_it_and_nobody_in_the_clear(authority, tmp_path, kind):
    async def main():
        credentials = Tls(ca=authority.ca).credentials()
        async with serving(server=server_options(authority), credentials=credentials) as (_, _, channel):
            assert await ask(kind, channel.address, tls=Tls(ca=authority.ca))
            await is_refused(kind, channel.address)
            stranger = Authority(tmp_path, "stranger")
            await is_refused(kind, channel.address, tls=Tls(ca=stranger.ca))
            assert await ask(kind, channel.address, tls=Tls(ca=authority.ca))

    run(main)


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_mutual_tls_wants_a_certificate_of_its_authority_from_every_client(authority, tmp_path, kind):
    clients = Authority(tmp_path, "clients")
    cert, key = clients.issue("ann")
    old = clients.issue("old", expired=True)
    other = authority.issue("other")
    mine = Tls(ca=authority.ca, cert=cert, key=key)

    async def main():
        options = server_options(authority, tls_client_ca=str(clients.ca))
        async with serving(server=options, credentials=mine.credentials()) as (llm, _, channel):
            assert await ask(kind, channel.address, tls=mine)
            await is_refused(kind, channel.address, tls=Tls(ca=authority.ca))
            for wrong_cert, wrong_key in (other, old):
                await is_refused(kind, channel.address, tls=Tls(ca=authority.ca, cert=wrong_cert, key=wrong_key))
            assert await ask(kind, channel.address, tls=mine)
            assert llm.num_live == 0

    run(main)


def test_probes_that_speak_no_tls_have_an_address_of_their_own(authority, tmp_path):
    (tmp_path / "tokens").write_text(f"ann:{'a' * 16}")
    options = server_options(authority, auth_tokens=str(tmp_path / "tokens"), health_listen="127.0.0.1:0")

    async def main():
        credentials = Tls(ca=authority.ca).credentials()
        async with (
            serving(server=options, credentials=credentials) as (llm, _, channel),
            grpc.aio.insecure_channel(channel.health_address) as probed,
        ):
            watch = aiter(health_pb2_grpc.HealthStub(probed).Watch(health_pb2.HealthCheckRequest()))
            seen = [(await anext(watch)).status]
            call = generation_pb2_grpc.GenerationServiceStub(probed).Generate(pb.GenerateRequest())
            assert await call.code() == grpc.StatusCode.UNIMPLEMENTED
            await llm.drain(0)
            return [*seen, (await anext(watch)).status]

    assert run(main) == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]


def test_new_certificates_are_taken_up_and_broken_ones_are_not(authority, caplog):
    options = server_options(authority)

    async def main():
        async with serving(server=options, credentials=Tls(ca=authority.ca).credentials()) as (_, _, channel):
            seen = [await asyncio.to_thread(common_name, channel.address, authority.ca)]
            authority.issue("server")
            seen += [await asyncio.to_thread(common_name, channel.address, authority.ca) for _ in range(2)]
            # A key that is not the certificate's: the pair before stays, which is told once.
            cert = authority.ca.parent / "server.crt"
            good = cert.read_bytes()
            other, _ = authority.issue("other")
            cert.write_bytes(other.read_bytes())
            seen += [await asyncio.to_thread(common_name, channel.address, authority.ca) for _ in range(2)]
            cert.unlink()
            seen.append(await asyncio.to_thread(common_name, channel.address, authority.ca))
            cert.write_bytes(good)
            seen.append(await asyncio.to_thread(common_name, channel.address, authority.ca))
            return seen

    with caplog.at_level(logging.INFO, logger="async_engine.reloaded"):
        first, *rest = run(main)
    assert len(set(rest)) == 1
    assert first != rest[0]
    taken, mismatch, missing, taken_again = [record.getMessage() for record in caplog.records]
    assert taken.startswith("read ")
    assert "are no certificate and its key" in mismatch
    assert "No such file" in missing
    assert taken_again == taken


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda options, cert, key: options.pop("tls_key"), "is required for TLS"),
        (lambda options, cert, key: options.update(tls_cert="", tls_client_ca=str(cert)), "is required for TLS"),
        (lambda options, cert, key: cert.unlink(), "No such file"),
        (lambda options, cert, key: cert.write_text("none"), "no certificate and its key in PEM"),
        (lambda options, cert, key: key.write_text("none"), "no certificate and its key in PEM"),
        (lambda options, cert, key: key.write_bytes(encrypted(key.read_bytes())), "no certificate and its key in PEM"),
        (lambda options, cert, key: options.update(tls_client_ca=str(key)), "no certificates in PEM"),
    ],
)
def test_files_of_no_use_at_the_start_are_one_line(authority, change, words):
    from async_engine.tls import server_credentials

    cert, key = authority.issue("server")
    options = {"tls_cert": str(cert), "tls_key": str(key)}
    change(options, cert, key)
    with pytest.raises((StartupError, InvalidRequestError)) as caught:
        server_credentials(ServerOptions(**options))
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_command_says_what_is_wrong_before_it_loads_a_model(authority, tmp_path):
    cert, _ = authority.issue("server")
    _, key = authority.issue("other")
    command = [sys.executable, "-m", "async_engine.cli", "serve", "/no/model", "--tls-cert", cert, "--tls-key", key]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"tailrace: {cert} and {key} are no certificate and its key in PEM")
    assert len(ended.stderr.splitlines()) == 1


def test_the_command_serves_tls(authority):
    cert, key = authority.issue("server")
    with ServerProcess("null", "--listen", "127.0.0.1:0", "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        server.wait_ready()
        with Client(server.address, tls=Tls(ca=authority.ca)) as client:
            assert client.complete("hi", max_tokens=4).finish.output_tokens == 4
        assert server.stop() == 0


def test_a_certificate_goes_with_its_key():
    with pytest.raises(ValueError, match="goes with its key"):
        Tls(cert="client.crt")
    assert isinstance(Tls().credentials(), grpc.ChannelCredentials)
