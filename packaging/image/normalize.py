"""Removes the random names of the build container from an image, so that two builds are identical.

  normalize.py DIRECTORY       an unpacked docker-archive; rewrites its configuration and its manifest
"""

import hashlib
import json
import os
import shutil
import sys


def main(directory):
    os.chdir(directory)
    with open("manifest.json") as file:
        manifest = json.load(file)
    [image] = manifest
    with open(image["Config"]) as file:
        config = json.load(file)
    config.pop("container", None)
    config.pop("container_config", None)
    config["config"].pop("Hostname", None)
    content = json.dumps(config, sort_keys=True).encode()
    # Only these files are read; the others are for versions of Docker before 1.10.
    for name in set(os.listdir()) - set(image["Layers"]):
        shutil.rmtree(name) if os.path.isdir(name) else os.remove(name)
    image["Config"] = hashlib.sha256(content).hexdigest() + ".json"
    with open(image["Config"], "wb") as file:
        file.write(content)
    with open("manifest.json", "w") as file:
        json.dump(manifest, file)


if __name__ == "__main__":
    main(sys.argv[1])
