"""Writes a release of the last commit: sdist, wheel, bill of materials and SHA256SUMS.

    python3 tools/release.py [--output dist] [--python PATH]

Everything is built twice, from two clones at different paths and with different umasks; the second
wheel is built from the sdist, as pip does. Archives that differ in a byte are no release. The tools
are those of tools/release.lock, in an environment made for this run alone; --python names one that
has them already. Signs nothing: docs/security.md says how that is done.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pythons import ROOT, Environment, InstallError, fail, look, say

LOCK = ROOT / "tools/release.lock"


def git(*arguments: str) -> str:
    """What git says about this checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError as error:
        fail(f"make release needs git: {error}")
    if done.returncode:
        fail(f"git {' '.join(arguments)}: {done.stderr.strip()}\nA release is made of a commit.")
    return done.stdout.strip()


def clone(folder: Path, umask: int) -> None:
    """The last commit as a stranger gets it: nothing that lies about here is in it."""
    command = ["git", "-c", "core.autocrlf=false", "clone", "--quiet", "--shared"]
    subprocess.run([*command, str(ROOT), str(folder)], check=True, umask=umask)


def build(python: str, kind: str, folder: Path, out: Path, umask: int) -> Path:
    """`kind` ("sdist" or "wheel") of what lies in `folder`, by `python`'s own setuptools."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"import sys, setuptools.build_meta as backend\nprint(backend.build_{kind}(sys.argv[1]))"
    done = subprocess.run(
        [python, "-c", code, str(out)],
        cwd=folder,
        capture_output=True,
        text=True,
        umask=umask,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    if done.returncode:
        fail(f"{done.stdout}{done.stderr}\nthe {kind} was not built")
    return out / done.stdout.splitlines()[-1]


def build_twice(python: str, work: Path) -> list[Path]:
    """Wheel and sdist, each the same bytes from both clones."""
    first, second = work / "first", work / "of another name" / "second"
    builds = []
    for folder, umask in ((first, 0o022), (second, 0o077)):
        clone(folder / "clone", umask)
        sdist = build(python, "sdist", folder / "clone", folder / "dist", umask)
        source = folder / "clone"
        if folder == second:
            with tarfile.open(sdist) as archive:
                # Not filter="data", which early releases of Python 3.10 and 3.11 lack.
                archive.extraction_filter = getattr(tarfile, "data_filter", None)
                archive.extractall(folder / "unpacked")
            (source,) = (folder / "unpacked").iterdir()
        builds.append([build(python, "wheel", source, folder / "dist", umask), sdist])
    for one, other in zip(*builds, strict=True):
        if (one.name, one.read_bytes()) != (other.name, other.read_bytes()):
            kept = Path(tempfile.mkdtemp(prefix="kernel_hub_release_"))
            shutil.copy(one, kept / f"first-{one.name}")
            shutil.copy(other, kept / f"second-{other.name}")
            fail(f"{one.name}: two builds of one commit differ; both are in {kept}. No release.")
    return builds[0]


def sums(paths: Sequence[Path]) -> str:
    """Lines as `sha256sum -c` reads them."""
    digests = ((hashlib.sha256(path.read_bytes()).hexdigest(), path.name) for path in paths)
    return "".join(f"{digest}  {name}\n" for digest, name in digests)


def release(python: str, out: Path, work: Path) -> None:
    """All files of the release into `out`, or none of them."""
    commit = git("rev-parse", "HEAD")
    seconds = os.environ.get("SOURCE_DATE_EPOCH") or git("show", "-s", "--format=%ct", commit)
    if changed := git("status", "--porcelain"):
        say(f"left out, as it is not committed:\n{changed}")
    say(f"building {commit} twice")
    wheel, sdist = build_twice(python, work)
    bill = work / f"{sdist.name.removesuffix('.tar.gz')}.cdx.json"
    command = [python, str(ROOT / "tools/sbom.py"), str(wheel), str(sdist), seconds, commit]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        fail(f"{done.stderr}\nthe bill of materials was not written")
    bill.write_text(done.stdout, encoding="utf-8")
    made = (sdist, wheel, bill)
    out.mkdir(parents=True, exist_ok=True)
    for path in made:
        shutil.copyfile(path, out / path.name)
    (out / "SHA256SUMS").write_text(sums(made), encoding="ascii")
    say("both builds are the same bytes; not signed (docs/security.md)")
    print((out / "SHA256SUMS").read_text(), end="")


def locked_environment(folder: Path) -> str:
    """The Python of a new environment that has tools/release.lock, each file by its digest."""
    hand = look(sys.executable)
    assert hand is not None, "this very interpreter does not run"
    own = Environment(folder, hand)
    own.ensure()
    options = ("--require-hashes", "--only-binary=:all:", "--no-deps")
    try:
        own.pip("install", "--ignore-installed", *options, "-r", str(LOCK))
    except InstallError as words:
        fail(
            f"make release builds with {LOCK.relative_to(ROOT)} alone, which pip refused:\n{words}"
        )
    return str(own.path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR")
    parser.add_argument("--python", help="one that has tools/release.lock installed")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="kernel_hub_release_") as work:
        python = args.python or locked_environment(Path(work) / "environment")
        release(python, args.output, Path(work))
    return 0


if __name__ == "__main__":
    sys.exit(main())
