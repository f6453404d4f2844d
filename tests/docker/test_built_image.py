"""The image for CPUs as it was built: what runs in it, how it ends, what its layers hold.

`make test-image` builds it and runs these; the engine is the one that it leaves in build/images.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.docker.bake import ROOT, targets
from tests.helpers.runs import anygauge, run_file
from tests.helpers.tiny_tokenizer import FIXTURES

pytestmark = pytest.mark.image

STORAGE = Path(os.environ.get("STORAGE", ROOT / "build/images"))
(TARGET,) = targets("cpu").values()
IMAGE = f"localhost/{TARGET['tags'][0]}"

BUILD_TOOLS = {
    "as", "autoconf", "c++", "c89", "c99", "cargo", "cc", "clang", "cmake", "cpp", "g++", "gcc",
    "gfortran", "git", "go", "ld", "make", "ninja", "nvcc", "pip", "pip3", "rustc", "uv",
}  # fmt: skip
MARK = b"pip-settings-are-in-no-layer"
CACHES = ("root/.cache", "root/.cargo", "tmp", "var/lib/apt/lists", "var/log", "src", "build")


def podman(*arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    """The engine that holds the image."""
    program = STORAGE / "podman"
    assert program.exists(), "the image is not built: make image-cpu"
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=timeout_s)


def flags(folder: Path, *more: str) -> list[str]:
    """Of `podman run`: cut off from networks, with a folder where it is on this machine."""
    return [
        *("run", "--rm", "--network=none", "--env=OMP_NUM_THREADS=1"),
        *(f"--volume={folder}:{folder}", f"--volume={FIXTURES}:{FIXTURES}:ro", *more),
    ]


def contained(
    folder: Path, *arguments: str, options: Sequence[str] = (), timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """``anygauge`` inside."""
    return podman(*flags(folder, *options), IMAGE, *arguments, timeout_s=timeout_s)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for whichever user the container has."""
    # pytest keeps its folders to this user.
    for one in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        one.chmod(0o777)
    return tmp_path


def test_the_entry_is_the_command_line(folder: Path) -> None:
    version = contained(folder, "--version")
    assert (version.returncode, version.stdout.split()[0]) == (0, "anygauge")
    assert "Usage: anygauge COMMAND" in contained(folder).stdout
    wrong = contained(folder, "train", "nowhere.yaml")
    assert wrong.returncode == 2 and "nowhere.yaml" in wrong.stderr


def test_labels_user_and_health_check() -> None:
    (seen,) = json.loads(podman("image", "inspect", IMAGE).stdout)
    assert seen["User"] == "10001"
    labels = seen["Labels"]
    assert labels["org.opencontainers.image.version"] == TARGET["args"]["VERSION"]
    assert re.fullmatch(r"[0-9a-f]{7,40}", labels["org.opencontainers.image.revision"])
    health = seen["HealthCheck" if "HealthCheck" in seen else "Healthcheck"]
    assert health["Test"][:2] == ["CMD", "anygauge"]
    assert podman("run", "--rm", IMAGE, *health["Test"][2:]).returncode == 0


def test_any_user_on_a_root_file_system_that_cannot_be_written(folder: Path) -> None:
    path = run_file(folder, strategy={"name": "single"}, checkpoint={"every": 2})
    done = contained(
        folder, "train", str(path),
        options=["--read-only", "--read-only-tmpfs=false", "--user=12345:23456", "--tmpfs=/tmp"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = folder / "out/tiny/adapter/adapter_model.safetensors"
    assert (result.stat().st_uid, result.stat().st_gid) == (12345, 23456)
    assert next((folder / "out/tiny/checkpoints").glob("step*"), None) is not None


def test_to_be_asked_to_end_is_to_write_a_checkpoint(folder: Path) -> None:
    path = run_file(folder, train={"steps": 2000})
    name = f"anygauge-test-{os.getpid()}"
    started = podman(
        *[flag for flag in flags(folder) if flag != "--rm"],
        *("--detach", "--name", name, IMAGE, "train", str(path), "--devices", "2"),
    )
    assert started.returncode == 0, started.stderr
    try:
        metrics = folder / "out/tiny/metrics.jsonl"
        deadline = time.monotonic() + 200
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert time.monotonic() < deadline, podman("logs", name).stdout
            time.sleep(0.5)
        assert podman("stop", "--time", "100", name).returncode == 0
        ended = podman("inspect", "--format", "{{.State.ExitCode}}", name).stdout.strip()
        assert ended == "75", podman("logs", name)
        said = podman("logs", name)
        assert "checkpoint" in said.stdout + said.stderr
    finally:
        podman("rm", "--force", name)
    steps = metrics.read_text().count('"loss"')
    assert 2 < steps < 2000
    again = contained(
        folder, "train", str(path), "--devices", "2", "--resume", "auto",
        "--set", f"train.steps={steps + 2}", timeout_s=400,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    kept = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [one["step"] for one in kept if "loss" in one] == list(range(1, steps + 3))


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """The image's files."""
    mounted = podman("image", "mount", IMAGE)
    assert mounted.returncode == 0, mounted.stderr
    yield Path(mounted.stdout.strip())
    podman("image", "unmount", IMAGE)


def files(root: Path) -> Iterator[Path]:
    for where, _folders, names in os.walk(root):
        yield from (Path(where, name) for name in names)


def test_no_build_tool_is_in_it(root: Path) -> None:
    found = set()
    for path in files(root):
        plain = re.sub(r"^x86_64-linux-gnu-|-?\d[\d.]*$", "", path.name)
        if plain in BUILD_TOOLS and path.stat().st_mode & 0o111:
            found.add(str(path.relative_to(root)))
    assert found == set()
    lists = (root / "var/lib/dpkg/info").glob("*.list")
    packages = {path.name.removesuffix(".list").partition(":")[0] for path in lists}
    assert "libc6" in packages and "libstdc++6" in packages
    assert not {name for name in packages if name.endswith("-dev") or name == "build-essential"}
    installed = {path.name.split("-")[0] for path in site(root).glob("*.dist-info")}
    assert not installed & {
        *("hatchling", "mypy", "ninja", "pip", "pytest", "ruff", "setuptools", "wheel")
    }
    assert {"anygauge", "torch", "deepspeed", "transformers"} <= installed


def test_no_cache_is_in_it(root: Path) -> None:
    left = {
        str(path.relative_to(root))
        for name in CACHES
        for path in files(root / name)
    }  # fmt: skip
    assert left == set()
    assert not [path for path in files(root / "var/cache") if path.stat().st_size > 100_000]


def test_no_secret_is_in_it(root: Path) -> None:
    assert not list((root / "etc/ssh").glob("ssh_host_*"))
    assert not (root / "etc/pip.conf").exists() or not (root / "etc/pip.conf").read_text()
    for name in (".git", ".netrc", ".env", ".ssh", ".aws", ".huggingface", ".pypirc"):
        assert not [p for p in (root, root / "root", root / "work") if (p / name).exists()]
    # What pip was told, a mirror's address with its password say, is in no file and no layer.
    told = [
        line.partition("=")[2].strip() for line in (STORAGE / "pip.conf").read_text().splitlines()
    ]
    secrets = [value.encode() for value in told if "/" in value] + [MARK]
    assert MARK in (STORAGE / "pip.conf").read_bytes()
    assert (STORAGE / "pip.conf").stat().st_mode & 0o077 == 0
    history = podman("history", "--no-trunc", "--format", "json", IMAGE).stdout
    config = podman("image", "inspect", IMAGE).stdout
    for secret in secrets:
        assert secret.decode() not in history + config
    for path in files(root):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 200_000:
            text = path.read_bytes()
            assert not any(secret in text for secret in secrets), path
            assert b"PRIVATE KEY-----" not in text or path.suffix in (".py", ".pyc"), path


def test_versions_are_those_of_the_table(root: Path) -> None:
    installed = {}
    for path in site(root).glob("*.dist-info"):
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        installed[name.lower().replace("_", "-")] = version.partition("+")[0]
    assert installed["torch"] == TARGET["args"]["TORCH_VERSION"]
    pins = dict(line.split("==") for line in (ROOT / "docker/constraints.txt").read_text().split())
    others = {name: version for name, version in installed.items() if pins.get(name) != version}
    assert set(others) == {"anygauge", "torch"}


def site(root: Path) -> Path:
    return next((root / "opt/anygauge/lib").glob("python3*/site-packages"))


def test_two_containers_are_two_machines_for_ssh(folder: Path) -> None:
    key = folder / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    names = [f"anygauge-test-{os.getpid()}-{number}" for number in (1, 2)]
    config = folder / "config"
    text = (ROOT / "docs/images.md").read_text()
    (written,) = re.findall(r"```text ssh-config\n(.*?)```", text, re.S)
    lines = []
    try:
        for number, name in enumerate(names):
            port = 3122 + number
            started = podman(
                *("run", "--detach", "--name", name, "--network=host", "--user=0"),
                *(f"--volume={folder}:{folder}", f"--volume={FIXTURES}:{FIXTURES}:ro"),
                *(f"--volume={key}.pub:/keys:ro", f"--env=PORT={port}"),
                *("--env=OMP_NUM_THREADS=1", "--env=GIVEN=a b $HOME", "--entrypoint=tini", IMAGE),
                *("--", "anygauge-sshd"),
            )
            assert started.returncode == 0, started.stderr
            here = written.replace("Host node1 node2", f"Host machine{number + 1}")
            here = here.replace("Port 3022", f"HostName 127.0.0.1\n    Port {port}")
            lines.append(here.replace("~/.ssh/id_ed25519", str(key)))
        config.write_text("\n".join(lines) + "\n")
        options = {
            "hosts": ["machine1", "machine2"],
            "config": str(config),
            "coordinator": "127.0.0.1",
            "python": "python3",
        }
        launch = {"launcher": "ssh", "nodes": 2, "devices": 1, "options": options}
        path = run_file(folder, launch=launch)
        deadline = time.monotonic() + 60
        while subprocess.run(
            ["ssh", "-F", config, "machine2", "true"], capture_output=True
        ).returncode:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        shown = subprocess.run(
            ["ssh", "-F", config, "machine1", "printenv GIVEN"], capture_output=True, text=True
        )
        assert shown.stdout == "a b $HOME\n", "it has the container's variables"
        done = anygauge(["launch", path])
        logs = "".join(one.read_text() for one in folder.glob("out/tiny/logs/*.log"))
        assert done.returncode == 0, done.stdout + done.stderr + logs
    finally:
        for name in names:
            podman("rm", "--force", "--time", "0", name)
    assert "rank 1 started" in (folder / "out/tiny/logs/agent1.log").read_text()


def test_a_server_says_what_it_lacks() -> None:
    done = podman("run", "--rm", "--entrypoint=anygauge-sshd", IMAGE)
    assert done.returncode == 2 and "no public key in /keys: mount one" in done.stderr
    unknown = ["--passwd=false", "--user=12345:0", "--env=KEYS=/etc/hostname"]
    done = podman("run", "--rm", *unknown, "--entrypoint=anygauge-sshd", IMAGE)
    assert done.returncode == 2 and "user id 12345 has no name in this image" in done.stderr


def test_anygauge_runs_it_where_the_engine_has_it() -> None:
    done = anygauge(
        ["image", "--backend", "cpu", "--run", "--engine", "podman", "--", "--version"],
        environment={"PATH": f"{STORAGE}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0 and done.stdout.startswith("anygauge "), done.stderr


class TestOthers:
    """The images for CUDA and Gaudi over stand-ins of their bases: all of them but the devices."""

    @pytest.mark.parametrize("backend", ["cuda", "hpu"])
    def test_the_newest_release_is_what_is_installed(self, backend: str) -> None:
        wanted = list(targets(backend).values())[-1]["args"]
        names = ("torch", "deepspeed", "transformers", "optimum-habana", "anygauge", "numpy")
        found = json.loads(inside(backend, VERSIONS, *names).stdout)
        assert found["anygauge"] == wanted["VERSION"]
        assert found["torch"].partition("+")[0] == TARGET["args"]["TORCH_VERSION"]  # the base's
        assert found["transformers"] == wanted.get("TRANSFORMERS", pinned("transformers"))
        if backend == "hpu":
            assert (found["optimum-habana"] or "") == wanted["OPTIMUM_HABANA"]
            assert found["deepspeed"].startswith("0.16.9")  # of the repository, not of an index
            assert found["numpy"] == "1.26.4"  # the base's, too
        else:
            assert found["deepspeed"] == pinned("deepspeed")

    @pytest.mark.parametrize("backend", ["cuda", "hpu"])
    def test_it_trains_as_any_user(self, folder: Path, backend: str) -> None:
        path = run_file(folder, train={"steps": 2})
        done = podman(
            *flags(folder, "--read-only", "--user=12345:0", "--tmpfs=/tmp"),
            *(f"localhost/stand-in-{backend}", "train", str(path), "--devices", "2"),
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @pytest.mark.parametrize("backend", ["cuda", "hpu"])
    def test_nothing_of_the_build_is_left(self, backend: str) -> None:
        image = f"localhost/stand-in-{backend}"
        (seen,) = json.loads(podman("image", "inspect", image).stdout)
        assert seen["User"] == "10001" and seen["Config"]["Entrypoint"][0] == "tini"
        assert f"anygauge, {backend}" in seen["Labels"]["org.opencontainers.image.title"]
        base = podman(
            "image", "inspect", "--format", "{{len .RootFS.Layers}}", "localhost/stand-in:1"
        )
        assert len(seen["RootFS"]["Layers"]) > int(base.stdout)
        mounted = podman("image", "mount", image)
        try:
            root = Path(mounted.stdout.strip())
            for name in ("build", "src", "tmp", "root/.cache", "var/lib/apt/lists"):
                assert not list(files(root / name)), name
            assert not list((root / "etc/ssh").glob("ssh_host_*"))
            assert not list((root / "var/cache/apt/archives").glob("*.deb"))
            assert not (root / "etc/pip.conf").exists() or not (root / "etc/pip.conf").read_text()
        finally:
            podman("image", "unmount", image)


VERSIONS = """
import importlib.metadata, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


def inside(backend: str, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program in the image over a stand-in."""
    return podman(
        *("run", "--rm", "--network=none", "--entrypoint=python3", f"localhost/stand-in-{backend}"),
        *("-c", program, *arguments),
    )


def pinned(name: str) -> str:
    lines = (ROOT / "docker/constraints.txt").read_text().split()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{name}=="))
