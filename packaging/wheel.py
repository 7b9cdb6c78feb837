"""Writes the wheel: the binary `satellite`, and `mcp-satellite` for `uvx mcp-satellite`.

  wheel.py VERSION STAGE OUT       $SOURCE_DATE_EPOCH is the time of all files
"""

import base64
import hashlib
import os
import sys
import time
import zipfile

TAG = "py3-none-manylinux_2_28_x86_64"
# uv and pipx link to the programs, so the link is resolved first.
SHIM = b"""#!/bin/sh
exec "$(dirname "$(readlink -f "$0")")/satellite" "$@"
"""
METADATA = """Metadata-Version: 2.4
Name: mcp-satellite
Version: {version}
Summary: Supervises MCP servers: restarts, sessions, sandboxes, one endpoint for clients
License-Expression: Apache-2.0 OR MIT
License-File: LICENSE-APACHE
License-File: LICENSE-MIT
License-File: THIRD-PARTY-LICENSES
Project-URL: Repository, https://github.com/mcp-satellite/mcp-satellite
Classifier: Operating System :: POSIX :: Linux
Requires-Python: >=3.8
Description-Content-Type: text/markdown

"""
WHEEL = f"Wheel-Version: 1.0\nGenerator: mcp-satellite\nRoot-Is-Purelib: false\nTag: {TAG}\n"


def main(version, stage, out):
    def staged(path):
        with open(os.path.join(stage, path), "rb") as file:
            return file.read()

    documents = "share/doc/mcp-satellite"
    scripts, info = f"mcp_satellite-{version}.data/scripts", f"mcp_satellite-{version}.dist-info"
    metadata = METADATA.format(version=version).encode() + staged(f"{documents}/README.md")
    # Path, content, mode. The directory dist-info comes last, as PEP 427 recommends.
    files = [
        (f"{scripts}/mcp-satellite", SHIM, 0o755),
        (f"{scripts}/satellite", staged("bin/satellite"), 0o755),
        (f"{info}/METADATA", metadata, 0o644),
        (f"{info}/WHEEL", WHEEL.encode(), 0o644),
    ]
    for name in ("LICENSE-APACHE", "LICENSE-MIT", "THIRD-PARTY-LICENSES"):
        files.append((f"{info}/licenses/{name}", staged(f"{documents}/{name}"), 0o644))
    record = "".join(f"{path},sha256={digest(content)},{len(content)}\n" for path, content, _ in files)
    files.append((f"{info}/RECORD", f"{record}{info}/RECORD,,\n".encode(), 0o644))

    changed = time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"]))[:6]
    with zipfile.ZipFile(os.path.join(out, f"mcp_satellite-{version}-{TAG}.whl"), "w") as wheel:
        for path, content, mode in files:
            entry = zipfile.ZipInfo(path, changed)
            entry.external_attr = (0o100000 | mode) << 16
            entry.create_system = 3
            wheel.writestr(entry, content, zipfile.ZIP_DEFLATED, 9)


def digest(content):
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    main(*sys.argv[1:])
