"""Environments of the matrix: virtual ones of the Pythons found here, and Debian systems in folders.

Debian has CPU builds of torch for other versions of Python. A Debian system is made by debootstrap. Its
programs run in a mount namespace: the mounts end with the last of them, however that ends.
"""

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / ".matrix"

# Debian's releases, with their versions of Python and torch: the oldest torch that pyproject.toml claims, and
# the newest that there is.
DEBIAN = {"trixie": ("3.13", "2.6"), "sid": ("3.14", "2.14")}
PACKAGES = "python3-torch python3-numpy python3-psutil python3-venv procps git iproute2".split()
TOOLS = "pyarrow pytest pytest-timeout pytest-xdist hypothesis tqdm matplotlib setuptools".split()

# Runs the remaining words in the system $1, in its folder $2. UCX, which Debian's torch loads, would take
# over signals. libuv may be missing.
ENTER = """
set -eu
for place in proc sys dev; do mount --rbind /$place "$1/$place"; done
mount -t tmpfs -o size=8g shm "$1/dev/shm"
root=$1; place=$2; shift 2
exec chroot "$root" env --chdir="$place" UCX_DEBUG_SIGNO=0 UCX_HANDLE_ERRORS=none USE_LIBUV=0 "$@"
"""


class Unavailable(Exception):
    """This machine cannot have the environment; the message says why."""


class Environment(ABC):
    """One Python with one set of versions.

    Attributes:
        name: Its name on the command line.
        versions: Prefixes of its versions, such as "torch 2.6.".
        suite: The folder that the tests are copied to.
        python: Its interpreter, as its programs name it.
    """

    def __init__(self, name: str, versions: list[str], suite: Path, python: str) -> None:
        self.name = name
        self.versions = versions
        self.suite = suite
        self.python = python

    @abstractmethod
    def prepare(self, wheel: Path) -> None:
        """Make or update the environment, with this wheel installed.

        Raises:
            Unavailable: If this machine cannot have it.
        """

    @abstractmethod
    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder of the tests; the options are those of `subprocess.run`."""

    def install(self, wheel: str, *requirements: str) -> None:
        """Install what the tests need, by constraints.txt beside the wheel, and then the wheel."""
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        self.run([*pip, "-c", str(Path(wheel).parent / "constraints.txt"), *requirements])
        self.run([*pip, "--no-deps", "--force-reinstall", wheel])  # the same version, built anew


class Virtual(Environment):
    """A virtual environment of a Python that this machine has."""

    def __init__(self, base: str, pins: dict[str, str]) -> None:
        kind = "oldest" if pins else "newest"
        self.base = base
        self.pins = pins
        self.folder = CACHE / f"{base}-{kind}"
        versions = [line.replace("==", " ") for line in pins.values()]
        python = str(self.folder / "venv" / "bin" / "python")
        super().__init__(self.folder.name, [f"Python {base[6:]}.", *versions], self.folder / "suite", python)

    def prepare(self, wheel: Path) -> None:
        if not works(self.base):
            raise Unavailable(f"there is no {self.base} here")
        self.suite.mkdir(parents=True, exist_ok=True)
        if not Path(self.python).exists():
            subprocess.run([self.base, "-m", "venv", str(self.folder / "venv")], check=True)
        self._refuse_gigabytes()
        shutil.copy(wheel, self.folder)
        write_constraints(self.folder, self.pins)
        new = str(self.folder / wheel.name)
        self.install(new, f"{new}[test]")

    def _refuse_gigabytes(self) -> None:
        """Refuse a torch that comes with CUDA's packages, unless that was asked for."""
        (torch,) = (line for line in constraints() if line.startswith("torch=="))
        pip = [self.python, "-m", "pip", "install", "--disable-pip-version-check", "--dry-run", torch]
        if os.environ.get("MATRIX_CUDA") != "1" and not self._has(torch):
            said = self.run(pip, check=False, capture_output=True)
            if said.returncode or "nvidia" in said.stdout:
                raise Unavailable(
                    f"no CPU build of {torch} for {self.base} is to be had here "
                    "(MATRIX_CUDA=1 takes another one, with gigabytes of CUDA's packages)"
                )

    def _has(self, requirement: str) -> bool:
        said = self.run([self.python, "-m", "pip", "freeze"], capture_output=True).stdout
        return requirement in (line.split("+")[0] for line in said.splitlines())

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.suite, check=options.pop("check", True), text=True, **options)


class Debian(Environment):
    """A Debian system in a folder, with its own Python and torch."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.root = CACHE / release
        python, torch = DEBIAN[release]
        super().__init__(
            release, [f"Python {python}.", f"torch {torch}."], self.root / "suite", "/venv/bin/python"
        )

    def prepare(self, wheel: Path) -> None:
        if os.geteuid() != 0:
            raise Unavailable("a Debian system is made and entered by root only")
        tools = ("debootstrap", "chroot", "unshare", "apt-get")
        if missing := [tool for tool in tools if not shutil.which(tool)]:
            raise Unavailable(f"it needs {', '.join(missing)} (apt-get install debootstrap)")
        if not self.root.exists():
            self._bootstrap()
        self.suite.mkdir(exist_ok=True)
        if not (self.root / "venv/bin/pip").exists():
            self._copy_settings()
            self._install_packages()
        self._copy_settings()  # Debian's ca-certificates has written this file meanwhile
        shutil.copy(wheel, self.root)
        write_constraints(self.root, self._debians("torch", "numpy", "psutil"))
        # One by one: Debian's torch asks for a sympy that Debian does not have.
        self.install(f"/{wheel.name}", *TOOLS)

    def _copy_settings(self) -> None:
        """Give the system this machine's settings for mirrors and package indices."""
        for path in ("etc/resolv.conf", "etc/hosts", "etc/pip.conf", "etc/ssl/certs/ca-certificates.crt"):
            if (source := Path("/") / path).exists():
                (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, self.root / path)

    def _bootstrap(self) -> None:
        new = CACHE / f"{self.release}.new"
        shutil.rmtree(new, ignore_errors=True)
        CACHE.mkdir(exist_ok=True)
        command = ["debootstrap", "--variant=minbase", self.release, str(new), mirror()]
        subprocess.run(["unshare", "--mount", *command], check=True)
        new.rename(self.root)

    def _install_packages(self) -> None:
        # A mirror that is a snapshot has lists that have expired.
        checks = 'Acquire::Check-Valid-Until "false";\nAcquire::Check-Date "false";\n'
        (self.root / "etc/apt/apt.conf.d/matrix").write_text(checks, encoding="utf-8")
        self.run(["apt-get", "update", "--quiet"])
        apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "--quiet", "--yes"]
        self.run([*apt, "--no-install-recommends", *PACKAGES])
        self.run(["python3", "-m", "venv", "--system-site-packages", "/venv"])

    def _debians(self, *names: str) -> dict[str, str]:
        """Return pins at Debian's versions, so that pip leaves these packages unchanged."""
        code = f"from importlib.metadata import version\nfor name in {names}: print(version(name))"
        versions = self.run(["python3", "-c", code], capture_output=True).stdout.split()
        return {name: f"{name}=={version}" for name, version in zip(names, versions, strict=True)}

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", ENTER, "enter", str(self.root)]
        whole = [*enter, f"/{self.suite.name}", *command]
        return subprocess.run(whole, check=options.pop("check", True), text=True, **options)


def works(python: str) -> bool:
    """Whether this is an interpreter, and not just a name of one that a version manager could install."""
    return (
        bool(shutil.which(python))
        and not subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode
    )


def mirror() -> str:
    """Return the mirror that apt uses on this machine.

    Raises:
        Unavailable: If apt has no lists of Debian.
    """
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    if found := [line for line in said if "security" not in line]:
        return found[0]
    raise Unavailable("apt has no lists of Debian's packages (apt-get update)")


def constraints() -> list[str]:
    """Return the pins of constraints.txt."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and line[0] != "#"]


def write_constraints(folder: Path, pins: dict[str, str]) -> None:
    """Write constraints.txt with other versions of some packages."""
    kept = [line for line in constraints() if line.split("==")[0] not in pins]
    (folder / "constraints.txt").write_text("\n".join([*kept, *pins.values()]) + "\n", encoding="utf-8")


def environments_of(project: dict[str, Any]) -> list[Environment]:
    """Return the environments for the versions claimed in the table `project` of pyproject.toml."""
    floors = dict(line.split(">=") for line in project["dependencies"])
    oldest = {name: f"{name}=={floor}" for name, floor in floors.items() if name != "torch"}
    least = int(project["requires-python"].removeprefix(">=3."))
    found = [f"python3.{minor}" for minor in range(least, 20) if works(f"python3.{minor}")]
    virtual = [Virtual(f"python3.{least}", oldest), *(Virtual(base, {}) for base in found)]
    return [*virtual, *map(Debian, DEBIAN)]
