"""Azure ML: rendering, refusals, how a container becomes an agent, how a job is followed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from anygauge.interface import AnygaugeError, LaunchProfile, Plan
from anygauge_clouds import container
from anygauge_clouds.azureml import Azureml, AzureService
from anygauge_clouds.service_job import ServiceJob
from tests.clouds.helpers import CARDS, Client, client_for, events_text, job, merged
from tests.helpers.plans_from_options import render

NAME = "tiny-run-1-d94772fd"
STORE = "azureml://datastores/blobs/paths"
OPTIONS: dict[str, Any] = {
    "workspace": "research",
    "resource_group": "ml",
    "compute": "gpu-cluster",
    "output": f"{STORE}/runs",
    "inputs": {
        "data": {"path": f"{STORE}/data/", "at": "/data"},
        "model": {"path": "azureml:llama:3", "at": "/models/llama", "mode": "download"},
    },
    "identity": "managed",
    "secrets": {"HF_TOKEN": "https://keys.vault.azure.net/secrets/hf"},
}


def rendered(
    change: dict[str, Any] | None = None, profile: LaunchProfile = CARDS, **fields: Any
) -> Plan:
    return render("azureml", job(**fields), merged(OPTIONS, change or {}), profile)


def described(plan: Plan) -> dict[str, Any]:
    return dict(yaml.safe_load(plan.files[-1].text))


def test_one_agent_starts_on_each_machine() -> None:
    made = described(rendered())
    assert made["distribution"] == {"type": "pytorch", "process_count_per_instance": 1}
    assert made["resources"] == {
        "instance_count": 2,
        "shm_size": "16g",
        # What Azure arranges itself is left out.
        "docker_args": "--cap-add=sys_nice --ulimit=memlock=-1",
    }
    assert made["command"] == (
        'python3 -m anygauge_clouds.container azureml --link /anygauge/run="${{outputs.run}}" '
        '--link /data="${{inputs.data}}" --link /models/llama="${{inputs.model}}" --grace 5'
    )
    assert made["outputs"]["run"]["path"] == f"{STORE}/runs/Tiny_Run.1/"
    assert (made["environment"], made["compute"]) == (
        {"image": "vendor/stack:1"}, "azureml:gpu-cluster",
    )  # fmt: skip
    extra = {"limits": {"timeout": 60}, "resources": {"docker_args": "-x"}, "display_name": None}
    other = described(rendered({"environment": "ours:4", "extra": extra}))
    assert other["environment"] == "azureml:ours:4" and other["limits"] == {"timeout": 60}
    assert "display_name" not in other
    # The user's fields win, beside those of the launcher.
    assert other["resources"] == {"instance_count": 2, "shm_size": "16g", "docker_args": "-x"}


def test_the_job_is_described_as_its_machines_see_it() -> None:
    plan = rendered()
    there = json.loads(plan.files[0].text)
    assert (there["run_directory"], there["run_file"]) == (
        "/anygauge/run",
        "/anygauge/run/run.json",
    )
    assert plan.folders == ("/anygauge/run", "/data", "/models/llama")
    assert plan.operations["status"][:6] == ("az", "ml", "job", "show", "--name", NAME)
    assert described(plan)["name"] == NAME


class TestAzureContainer:
    """What the command does on a machine."""

    @pytest.fixture(autouse=True)
    def _code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        plan = rendered({"secrets": None, "identity": None})
        for file in plan.files[:-1]:
            (tmp_path / Path(file.path).name).write_text(file.text)
        monkeypatch.chdir(tmp_path)
        for name in ("NODE_RANK", "MASTER_ADDR"):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / "mounted").mkdir()

    def words(self, place: Path) -> list[str]:
        return ["--link", f"{place / 'deep' / 'run'}={place / 'mounted'}", "--grace", "5"]

    def test_it_becomes_the_agent_of_its_machine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NODE_RANK", "1")
        monkeypatch.setenv("MASTER_ADDR", "10.0.0.4")
        for _ in range(2):  # a container that starts again finds its links
            command, variables = container.azureml_agent(self.words(tmp_path))
        assert command[1:] == [
            *("-m", "anygauge.launch.agent", "--job", str(tmp_path / "job.json")),
            *("--node-rank", "1", "--coordinator", "10.0.0.4:4711", "--grace", "5"),
            *("--variables", str(tmp_path / "variables.json")),
        ]
        assert variables == {}
        assert (tmp_path / "deep" / "run").readlink() == tmp_path / "mounted"

    def test_without_azures_variables_it_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(AnygaugeError, match="NODE_RANK and MASTER_ADDR are not set"):
            container.azureml_agent(self.words(tmp_path))

    def test_a_mount_that_is_missing_or_in_the_way_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(
            AnygaugeError,
            match="/data: Azure did not mount this folder: what it gave, '/nowhere', does",
        ):
            container.link("/data=/nowhere")
        (tmp_path / "taken").mkdir()
        with pytest.raises(
            AnygaugeError, match=r"cannot make .*taken a link to .* Choose another folder"
        ):
            container.link(f"{tmp_path / 'taken'}={tmp_path / 'mounted'}")

    def test_secrets_come_from_the_vault(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The packages are stand-ins of the same names; a vault was never asked."""
        asked: list[tuple[str, str]] = []

        class SecretClient:
            def __init__(self, vault_url: str, credential: object) -> None:
                self._url = vault_url

            def get_secret(self, name: str) -> Any:
                asked.append((self._url, name))
                return type("Secret", (), {"value": "hf_xyz"})()

        parts: dict[str, dict[str, Any]] = {
            "azure": {},
            "azure.core": {},
            "azure.core.exceptions": {"AzureError": OSError},
            "azure.identity": {"DefaultAzureCredential": object},
            "azure.keyvault": {},
            "azure.keyvault.secrets": {"SecretClient": SecretClient},
        }
        for name, members in parts.items():
            module = ModuleType(name)
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, name, module)
        assert container.vault_secrets(OPTIONS["secrets"]) == {"HF_TOKEN": "hf_xyz"}
        assert asked == [("https://keys.vault.azure.net", "hf")]

    def test_without_azures_packages_the_image_is_blamed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "azure.identity", None)
        with pytest.raises(AnygaugeError, match="needs azure-identity and azure-keyvault-secrets"):
            container.vault_secrets(OPTIONS["secrets"])


@pytest.fixture
def az(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("HF_HOME", "/cache")
    return client_for("az", AzureService, tmp_path, monkeypatch)


HEADER = f"RunId: {NAME}\nWeb View: https://ml.azure.com/runs/{NAME}\n"


def submitted(client: Client, folder: Path) -> ServiceJob:
    client.answer("create", out=f"{NAME}\n")
    return Azureml().submit(rendered(folder=folder / "Tiny_Run.1"))


def test_a_job_is_submitted_and_found_again(az: Client, tmp_path: Path) -> None:
    running = submitted(az, tmp_path)
    folder = tmp_path / "Tiny_Run.1"
    assert az.asked[0][0] == [
        *("ml", "job", "create", "--file", str(folder / "job.yaml")),
        *("--resource-group", "ml", "--workspace-name", "research"),
        *("--query", "name", "--output", "tsv"),
    ]
    variables = folder / "code" / "variables.json"
    assert json.loads(variables.read_text()) == {"HF_HOME": "/cache"}
    assert variables.stat().st_mode & 0o777 == 0o600
    az.answer("show", NAME, out="Preparing\n")
    again = Azureml().attach(json.loads(json.dumps(running.record)), folder)
    assert again.state().text == f"Azure ML job {NAME}: Preparing"


def test_a_job_is_followed_through_the_stream_of_its_first_machine(
    az: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AzureService, "log_delay_s", 60.0)
    running = submitted(az, tmp_path)
    for state in ("Queued", "Running", "Completed"):
        az.answer("show", out=f"{state}\n")
    az.answer("stream", out=HEADER + "=====\n" + events_text(
        {"event": "step", "time": 1.0, "step": 1},
        {"event": "ended", "time": 2.0, "state": "ok", "exit_status": 0, "cause": ""},
    ) + "\nExecution Summary\n")  # fmt: skip
    events = list(running.events())
    texts = [event["text"] for event in events if event["event"] == "message"]
    assert [text.rpartition(" ")[2] for text in texts] == ["Queued", "Running", "Completed"]
    assert [event["event"] for event in events if event["event"] != "message"] == ["step", "ended"]
    assert events[-1]["exit_status"] == 0


@pytest.mark.parametrize("has_log", [False, True])
def test_of_a_job_that_has_ended_the_log_is_fetched(
    az: Client, tmp_path: Path, has_log: bool
) -> None:
    running = submitted(az, tmp_path)
    kept = tmp_path / "Tiny_Run.1" / "azure" / "artifacts" / "user_logs"
    az.answer("show", out="Failed\n")
    az.answer("stream", status=1, out=HEADER, err="JobException")
    az.answer("download", status=0 if has_log else 1, err="no artifacts")
    if has_log:
        kept.mkdir(parents=True)
        ended = {"event": "ended", "state": "failed", "exit_status": 1, "cause": "rank 3"}
        (kept / "std_log_process_00.txt").write_text(events_text(ended))
    final = list(running.events())[-1]
    assert (final["state"], final["exit_status"]) == ("failed", 1)
    assert final["cause"] == ("rank 3" if has_log else f"Azure ML job {NAME}: Failed")
