"""The suite against the installed wheel, with each version that pyproject.toml claims (`make test-matrix`).

Wheel and sdist are built from the files of the checkout. Each environment gets the wheel, and the tests
without the package beside them, so that the installed package is tested. The benchmarks are no part of the
wheel, and their tests are left out. Everything that is made lies in `.matrix`, to be used again.

    python tests/matrix/run.py --list
    python tests/matrix/run.py trixie -- tests/store -x
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

from environments import CACHE, REPOSITORY, Environment, Unavailable, environments_of

SOURCE = CACHE / "source"
WHEELS = CACHE / "wheels"
VERSIONS = """
import importlib.metadata, platform, shmloader
assert "site-packages" in shmloader.__file__, shmloader.__file__
versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "numpy", "pyarrow", "psutil")]
print(f"Python {platform.python_version()}", *versions, sep=", ")
"""


def copy_sources() -> None:
    """Copy the files that git would commit: a build in the checkout would pack files of earlier builds."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    shutil.rmtree(SOURCE, ignore_errors=True)
    for name in filter(None, names.split("\0")):
        if (REPOSITORY / name).is_file():  # git may list a file that is deleted
            (SOURCE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, SOURCE / name)


def build() -> Path:
    """Build the wheel, the sdist, and a second wheel of the sdist, which must be the same as the first."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", str(SOURCE), "--outdir"]
    subprocess.run([*command, str(WHEELS), "--wheel"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*command, str(WHEELS / "sdist")], check=True, stdout=subprocess.DEVNULL)
    (wheel,), (second,) = WHEELS.glob("*.whl"), (WHEELS / "sdist").glob("*.whl")
    if differing := set(contents(wheel)) ^ set(contents(second)):
        raise SystemExit(f"the sdist builds another wheel: {sorted(differing)}")
    return wheel


def contents(wheel: Path) -> Iterator[tuple[str, int]]:
    """Yield name and checksum of each file."""
    with zipfile.ZipFile(wheel) as archive:
        for file in archive.infolist():
            yield file.filename, file.CRC


def lay_out(suite: Path) -> None:
    """Copy tests, pages and benchmarks, and not the package; pytest keeps its memory of failures."""
    for old in suite.iterdir():
        if old.name != ".pytest_cache":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    left_out = shutil.ignore_patterns("shmloader", "*.egg-info", "build")
    shutil.copytree(SOURCE, suite, ignore=left_out, dirs_exist_ok=True)


def test_in(environment: Environment, wheel: Path, arguments: list[str]) -> str:
    """Run the suite in one environment; returns its versions and the counts."""
    environment.prepare(wheel)
    lay_out(environment.suite)
    versions = environment.run([environment.python, "-c", VERSIONS], capture_output=True).stdout.strip()
    if lacking := [version for version in environment.versions if version not in versions]:
        return f"FAILED: has {versions}, and not {', '.join(lacking)}"
    print(f"\n== {environment.name}: {versions}", flush=True)
    results = environment.suite / "results.xml"
    command = [
        environment.python,
        "-m",
        "pytest",
        "--ignore=tests/bench",
        f"--junitxml={results.name}",
        *arguments,
    ]
    environment.run(command, check=False, env=os.environ | {"CI": "true"})  # all of the heavy cases
    return f"{counts(results)} with {versions}"


def counts(results: Path) -> str:
    """Return the counts of a run, from the file that pytest wrote."""
    if not results.exists():
        return "FAILED: pytest wrote no results"
    suite = ET.parse(results).getroot()[0]
    tests, failures, errors, skipped = (
        int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
    )
    bad = failures + errors
    passed = tests - bad - skipped
    return f"{'ok' if passed and not bad else 'FAILED'}: {passed} passed, {bad} failed, {skipped} skipped"


def main() -> int:
    """Build, test in the environments asked for, and print one line for each."""
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [names] [-- pytest's]",
    )
    parser.add_argument("names", nargs="*", help="environments; all if none is named")
    parser.add_argument("--list", action="store_true", help="list the environments and end")
    options = parser.parse_args(words[:split])
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = {environment.name: environment for environment in environments_of(project)}
    if options.list:
        print(*(f"{name:<18} {', '.join(one.versions)}" for name, one in known.items()), sep="\n")
        return 0
    if unknown := set(options.names) - set(known):
        parser.error(f"no such environments: {', '.join(sorted(unknown))} (see --list)")
    copy_sources()
    wheel = build()
    lines = []
    for name in options.names or known:
        began_s = time.monotonic()
        try:
            line = test_in(known[name], wheel, words[split + 1 :])
        except Unavailable as reason:
            line = f"skipped: {reason}"
        except subprocess.CalledProcessError as error:  # its output stands above
            line = f"FAILED: a command of its preparation ended with status {error.returncode}"
        lines.append(f"{name:<18} {line}, {(time.monotonic() - began_s) / 60:.0f} minutes")
    print("", *lines, sep="\n")
    return any("FAILED" in line for line in lines)


if __name__ == "__main__":
    sys.exit(main())
