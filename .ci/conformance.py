"""Counts what the conformance suite has found: conformance.py RESULTS SCENARIOS CHECKS

RESULTS is the suite's output directory, SCENARIOS how many must have run, CHECKS how many must have succeeded. Neither a failure nor a warning
is let pass; what the suite only tells (INFO) and what does not apply (SKIPPED) is shown.
"""

import collections
import json
import pathlib
import sys

results, expected = pathlib.Path(sys.argv[1]), tuple(map(int, sys.argv[2:]))
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
counted = len(scenarios), found["SUCCESS"]
if counted != expected:
    print("{} scenarios with {} checks have succeeded, where {} with {} did".format(*counted, *expected))
sys.exit(bool(bad) or counted != expected)
