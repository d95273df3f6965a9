"""Random requests by the OpenAPI description, in this process: never a 5xx, and nothing is executed."""

from __future__ import annotations

import json
import warnings
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.direct_queue import DirectQueue, problems

pytest.importorskip("fastapi")

from weft.serve.app import make_app
from weft.serve.options import ServeOptions
from weft.serve.submissions import Tokens
from weft.serve.supervisor import Supervisor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it would rather have another package than httpx
    from starlette.testclient import TestClient

TOKEN = "t" * 24
TEXT = st.text(max_size=30)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
SETTINGS = ("graph", "model", "hidden", "epochs", "lr", "betas", "name", "model_args", "seed", "given", "norm")
TASKS = st.fixed_dictionaries(
    {"graph": st.just("demo") | PLAIN},
    optional={name: PLAIN for name in SETTINGS if name != "graph"} | {"model": st.sampled_from(["gcn", "os:system"])},
)
SWEEPS = st.fixed_dictionaries(
    {"tasks": st.lists(TASKS, max_size=3)},
    optional={"sweep": PLAIN | st.fixed_dictionaries({"name": PLAIN}), "key": PLAIN},
)
BODIES = (
    PLAIN
    | SWEEPS
    | st.fixed_dictionaries(
        {"task": TASKS},
        optional=dict.fromkeys(
            ("key", "priority", "after", "budget", "deadline", "time_limit", "max_attempts", "user"), PLAIN
        ),
    )
)
INFER = st.fixed_dictionaries({}, optional=dict.fromkeys(("of", "weights", "nodes", "graph", "latency_target"), PLAIN))
INFERENCES = st.fixed_dictionaries({"infer": PLAIN | INFER}, optional={"task": TASKS, "tasks": PLAIN, "key": PLAIN})
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)


class Asleep(Supervisor):
    """A supervisor that starts no process."""

    def is_alive(self) -> bool:
        return True


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    options = ServeOptions(tmp_path_factory.mktemp("openapi") / "q.db", quota=1_000_000)
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    app = make_app(options, Asleep(options), Tokens.read(tokens))
    with TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"}, raise_server_exceptions=False) as opened:
        yield opened
    with DirectQueue(options.db) as queue:
        assert problems(queue) == []
        assert {task.spec["task"].get("model", "gcn") for task in queue.tasks()} <= {"gcn"}


@FEW
@given(body=BODIES | INFERENCES)
def test_any_body(client, body):
    answer = client.post("/api/tasks", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 201 or 400 <= answer.status_code < 500, answer.text


@FEW
@given(body=st.binary(max_size=200))
def test_any_bytes(client, body):
    answer = client.post("/api/tasks", content=body, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500, answer.text


@FEW
@given(name=TEXT, what=st.sampled_from(["", "/logs", "/curve", "/result", "/weights"]))
def test_any_task_name(client, name, what):
    answer = client.get(f"/api/tasks/{quote(name, safe='')}{what}")
    assert answer.status_code < 500, answer.text


@FEW
@given(kind=st.sampled_from(["tasks", "sweeps"]), name=TEXT, what=st.sampled_from(["cancel", "pause", "resume"]))
def test_any_change(client, kind, name, what):
    assert 400 <= client.post(f"/api/{kind}/{quote(name, safe='')}/{what}").status_code < 500


@FEW
@given(name=TEXT, what=st.sampled_from(["", "/report"]))
def test_any_sweep_name(client, name, what):
    assert client.get(f"/api/sweeps/{quote(name, safe='')}{what}").status_code < 500


@FEW
@given(user=TEXT, limit=st.integers() | TEXT, beyond=st.integers() | TEXT)
def test_any_query_of_sweeps(client, user, limit, beyond):
    assert client.get("/api/sweeps", params={"user": user, "limit": limit, "beyond": beyond}).status_code < 500


@FEW
@given(state=TEXT, user=TEXT, sweep=TEXT, limit=st.integers() | TEXT, beyond=st.integers() | TEXT)
def test_any_query(client, state, user, sweep, limit, beyond):
    asked = {"state": state, "user": user, "sweep": sweep, "limit": limit, "beyond": beyond}
    assert client.get("/api/tasks", params=asked).status_code < 500


def test_the_description_has_the_token_and_the_last_event(client):
    described = client.get("/openapi.json").json()
    [(name, scheme)] = described["components"]["securitySchemes"].items()
    assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
    operations = {path: one for path, methods in described["paths"].items() for one in methods.values()}
    assert "security" not in operations.pop("/health")
    assert all(one["security"] == [{name: []}] for one in operations.values())
    headers = [one for one in described["paths"]["/api/events"]["get"]["parameters"] if one["in"] == "header"]
    assert [one["name"] for one in headers] == ["Last-Event-ID"]
    assert not headers[0]["required"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("weights", "octet-stream"), ("kept", "octet-stream"), ("predictions", "octet-stream"), ("result", "json")],
)
def test_the_description_has_the_types_of_downloads(client, path, kind):
    answer = client.get("/openapi.json").json()["paths"][f"/api/tasks/{{task}}/{path}"]["get"]["responses"]["200"]
    assert set(answer["content"]) == {f"application/{kind}"}


def test_the_description_has_the_type_of_events(client):
    answer = client.get("/openapi.json").json()["paths"]["/api/events"]["get"]["responses"]["200"]
    assert set(answer["content"]) == {"text/event-stream"}


def test_a_server_without_tokens_asks_for_none(tmp_path):
    options = ServeOptions(tmp_path / "q.db")
    assert "securitySchemes" not in make_app(options, Asleep(options), Tokens(open=True)).openapi().get(
        "components", {}
    )


@pytest.fixture
def without_tokens(tmp_path):
    options = ServeOptions(tmp_path / "q.db")
    with TestClient(make_app(options, Asleep(options), Tokens(open=True)), "http://localhost:8787") as opened:
        yield opened


@pytest.mark.parametrize(
    "headers",
    [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "https://evil.com"},
     {"Origin": "http://localhost:8788"}, {"Origin": "null"}],
)  # fmt: skip
def test_pages_of_other_sites_change_nothing_on_a_server_without_tokens(without_tokens, headers):
    [task] = without_tokens.post("/api/tasks", json={"task": {"graph": "demo"}}).json()["tasks"]
    refused = without_tokens.post(f"/api/tasks/{task['id']}/cancel", headers=headers)
    assert refused.status_code == 403
    assert "pages of other sites" in refused.json()["error"]
    assert without_tokens.get(f"/api/tasks/{task['id']}", headers=headers).json()["state"] == "queued"
    own = {"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:8787"}
    assert without_tokens.post(f"/api/tasks/{task['id']}/cancel", headers=own).json()["state"] == "cancelled"


@pytest.mark.parametrize(
    "host", ["localhost:evil.com", "localhost:", "evil.com:80", "127.0.0.1.evil.com", "localhost:\u0661"]
)
def test_a_server_without_tokens_has_no_other_name(without_tokens, host):
    assert without_tokens.get("/api/tasks", headers={"Host": host.encode()}).status_code == 400


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8787", "[::1]:80", "[::1]"])
def test_names_of_a_server_without_tokens(without_tokens, host):
    assert without_tokens.get("/api/tasks", headers={"Host": host}).status_code == 200


def test_schemathesis(client):
    """The same by a tool made for it, where it is installed."""
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_asgi("/openapi.json", client.app, headers={"Authorization": f"Bearer {TOKEN}"})
    seen = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path == "/api/events":
            continue  # a stream that does not end

        @settings(FEW, max_examples=15)
        @given(case=operation.as_strategy())
        def every_case(case):
            answer = case.call(headers={"Authorization": f"Bearer {TOKEN}"})
            assert answer.status_code < 500, answer.text

        every_case()
        seen += 1
    assert seen >= 10
