"""Counts what the conformance suite has found: conformance.py RESULTS CHECKS

RESULTS is the suite's output directory, CHECKS how many must have succeeded, or `any`. Neither a failure nor a warning
is let pass; what the suite only tells (INFO) and what does not apply (SKIPPED) is shown.
"""

import collections
import json
import pathlib
import sys

results, expected = pathlib.Path(sys.argv[1]), sys.argv[2]
scenarios = sorted(results.glob("**/checks.json"))
found = collections.Counter()
bad = []
for file in scenarios:
    for check in json.loads(file.read_text()):
        status = check["status"]
        found[status] += 1
        line = f"{file.parent.name}: {status} {check['id']}: {check.get('errorMessage') or check.get('details')}"
        if status in ("FAILURE", "WARNING"):
            bad.append(line)
        elif status == "SKIPPED":
            print(line)
print(f"{len(scenarios)} scenarios:", ", ".join(f"{count} {status}" for status, count in sorted(found.items())))
print(*bad, sep="\n", end="\n" if bad else "")
if expected != "any" and found["SUCCESS"] != int(expected):
    bad.append("")
    print(f"{found['SUCCESS']} checks have succeeded, where {expected} did")
sys.exit(1 if bad or not scenarios else 0)
