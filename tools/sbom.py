"""Writes the bill of materials of a release: CycloneDX 1.6, as JSON.

    python tools/sbom.py WHEEL SDIST SECONDS COMMIT > kernel_hub-VERSION.cdx.json

It says what machine code is in the wheel (each cubin and host library, by digest, with what it was
built from), what the package requires, and the digests of both archives. Nothing in it is drawn by
lot or read from a clock: the same archives give the same bytes. Needs cyclonedx-python-lib.
"""

from __future__ import annotations

import email.parser
import hashlib
import json
import re
import sys
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import (
    ExternalReference,
    ExternalReferenceType,
    HashAlgorithm,
    HashType,
    Property,
    XsUri,
)
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

MANIFEST = "kernel_hub/cubins/manifest.json"
# Recorded beside a library: the compiler, then the digest of the source.
RECORD_SUFFIX = ".txt"
TOOLS = ("setuptools", "cyclonedx-python-lib")


def sha256(content: bytes) -> list[HashType]:
    """The digest as a component has it."""
    return [HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(content).hexdigest())]


def properties(**values: Any) -> list[Property]:
    """Those that are known, under the name of the project."""
    known = {name: value for name, value in values.items() if value not in (None, "", [])}
    return [Property(name=f"kernel_hub:{name}", value=str(known[name])) for name in known]


def cubins(wheel: zipfile.ZipFile, manifest: Mapping[str, Any]) -> Iterator[Component]:
    """Each cubin, with what the manifest says of its making; the digests must agree."""
    for name, archs in manifest["cubins"].items():
        for arch, entry in archs.items():
            path = f"kernel_hub/cubins/{entry['file']}"
            digest = sha256(wheel.read(path))
            if digest[0].content != entry["sha256"]:
                sys.exit(f"{path} in {wheel.filename}: not the digest that {MANIFEST} has")
            yield Component(
                type=ComponentType.FILE,
                name=path,
                bom_ref=path,
                description=f"GPU code: {name} for {arch}",
                hashes=digest,
                properties=properties(
                    source=entry["source"],
                    source_sha256=entry["source_sha256"],
                    nvcc=entry["toolkit"],
                    flags=" ".join(entry["flags"]),
                    minimum_driver=entry["minimum_driver"],
                ),
            )


def host_libraries(wheel: zipfile.ZipFile) -> Iterator[Component]:
    """Each file of host machine code, with the compiler and the source that are recorded beside."""
    names = wheel.namelist()
    for path in sorted(name for name in names if re.search(r"\.(so|dll|dylib|pyd)$", name)):
        record = path.rpartition(".")[0] + RECORD_SUFFIX
        lines = wheel.read(record).decode().splitlines() if record in names else []
        compiler, source = [*lines, "", ""][:2]
        yield Component(
            type=ComponentType.FILE,
            name=path,
            bom_ref=path,
            description="host machine code: the C launcher",
            hashes=sha256(wheel.read(path)),
            properties=properties(compiler=compiler, source_sha256=source),
        )


def requirements(lines: list[str]) -> Iterator[Component]:
    """The packages of Requires-Dist, each once: required, or optional by an extra."""
    found: dict[str, list[str]] = {}
    for line in lines:
        match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line)
        assert match, line
        found.setdefault(match[0], []).append(line)
    for name, told in found.items():
        required = any("extra ==" not in line for line in told)
        yield Component(
            type=ComponentType.LIBRARY,
            name=name,
            bom_ref=f"requirement:{name}",
            purl=PackageURL("pypi", name=re.sub(r"[-_.]+", "-", name).lower()),
            scope=ComponentScope.REQUIRED if required else ComponentScope.OPTIONAL,
            properties=properties(requires="; or ".join(told)),
        )


def compilers(manifest: Mapping[str, Any]) -> Iterator[Component]:
    """What wrote the machine code of the cubins; it is no part of what is delivered."""
    entries = [entry for archs in manifest["cubins"].values() for entry in archs.values()]
    for version in sorted({entry["toolkit"] for entry in entries}):
        yield Component(
            type=ComponentType.APPLICATION,
            name="nvcc",
            group="NVIDIA CUDA Toolkit",
            version=version,
            bom_ref=f"nvcc@{version}",
            scope=ComponentScope.EXCLUDED,
        )


def bill(wheel_path: Path, sdist_path: Path, seconds: int, commit: str) -> Bom:
    """What is in the two archives and what they need, dated with the commit."""
    with zipfile.ZipFile(wheel_path) as wheel:
        (info,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        about = email.parser.BytesParser().parsebytes(wheel.read(info))
        manifest = json.loads(wheel.read(MANIFEST))
        inside = [*cubins(wheel, manifest), *host_libraries(wheel)]
    needed = list(requirements(about.get_all("Requires-Dist", [])))
    references = [
        ExternalReference(
            type=ExternalReferenceType.DISTRIBUTION, url=XsUri(path.name), hashes=sha256(content)
        )
        for path in (wheel_path, sdist_path)
        for content in [path.read_bytes()]
    ]
    root = Component(
        type=ComponentType.LIBRARY,
        name=about["Name"],
        version=about["Version"],
        bom_ref="kernel_hub",
        description=about["Summary"],
        purl=PackageURL("pypi", name="kernel-hub", version=about["Version"]),
        licenses=[LicenseFactory().make_from_string("Apache-2.0")],
        external_references=references,
        properties=properties(commit=commit),
        components=inside,
    )
    tools = (
        Component(type=ComponentType.APPLICATION, name=name, version=metadata.version(name))
        for name in TOOLS
    )
    made = Bom(
        metadata=BomMetaData(
            component=root,
            tools=ToolRepository(components=tools),
            timestamp=datetime.fromtimestamp(seconds, timezone.utc),
        ),
        components=[*needed, *compilers(manifest)],
        # Of the digest of the wheel: another wheel has another number.
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, str(next(iter(references[0].hashes)).content)),
    )
    made.register_dependency(root, [one for one in needed if one.scope is ComponentScope.REQUIRED])
    return made


def main(argv: list[str]) -> None:
    made = bill(Path(argv[0]), Path(argv[1]), int(argv[2]), argv[3])
    made.validate()
    writer = make_outputter(made, OutputFormat.JSON, SchemaVersion.V1_6)
    print(writer.output_as_string(indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
