#!/usr/bin/env python3
"""Drives a real satellite through its command line, and fails if it violates a guarantee.

  drive.py demo                   the README's first command: all servers online, one killed and restarted, SIGTERM
  drive.py smoke SERVERS_DIR      the same with two real servers of an mcp.json
  drive.py kills COUNT SECONDS    COUNT random kills; each victim must restart, or fail permanently as its budget says
  drive.py remotes SERVERS_DIR COUNT SECONDS
                                  kills and restarts two real remote servers until COUNT connections are lost; every status
                                  that is read meanwhile must be correct
  drive.py flood SECONDS          one server writes 100 MB/s to its stderr: measures the latency of calls to another server,
                                  and the memory of the satellite. Fails only if a call fails
  drive.py watch INSTANCES SECONDS
                                  INSTANCES remote instances, of which 100 a second are connected again: measures what 1 and 50
                                  watchers of their stream cost, the page of the overview, and a scrape of /metrics

$SATELLITE_RUN (default: `cargo run --release --quiet --`) starts the satellite. $SATELLITE (default:
`target/release/satellite`) runs all other commands. Only processes that the satellite or this script started are killed,
each by its pid.
"""

import contextlib
import glob
import http.client
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid

RUN = shlex.split(os.environ.get("SATELLITE_RUN", "cargo run --release --quiet --"))
ASK = shlex.split(os.environ.get("SATELLITE", "target/release/satellite"))
# Timeout in seconds of a wait for a state; generous, because nothing is measured.
PATIENCE = 60.0


def fail(why):
    sys.exit(f"drive.py: {why}")


def wait_until(what, ready, patience=PATIENCE):
    """Calls `ready` until it returns a true value, and returns that value."""
    until = time.monotonic() + patience
    while True:
        answer = ready()
        if answer:
            return answer
        if time.monotonic() > until:
            fail(f"timeout after {patience:.0f} s while waiting for: {what}")
        time.sleep(0.02)


class Satellite:
    """One `satellite run` or `demo` in its own data directory. All descendants inherit a tag that identifies them."""

    def __init__(self, directory, arguments):
        self.data_dir = os.path.join(directory, "data")
        self.tag = f"SATELLITE_DRIVE={uuid.uuid4().hex}"
        name, value = self.tag.split("=")
        self.log = open(os.path.join(directory, "log"), "w+")
        command = [*RUN, *arguments, "--data-dir", self.data_dir]
        self.process = subprocess.Popen(
            command, env={**os.environ, name: value}, stdout=self.log, stderr=subprocess.STDOUT
        )

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if error is not None:
            self.log.seek(0)
            print("---- last lines of the satellite's log ----", *self.log.readlines()[-40:], sep="\n", file=sys.stderr)

    def output(self):
        # The satellite's own descriptor has another position.
        with open(self.log.name) as log:
            return log.read()

    def ask(self, *arguments):
        return subprocess.run(
            [*ASK, *arguments, "--data-dir", self.data_dir], capture_output=True, text=True, timeout=PATIENCE
        )

    def status(self):
        """Returns the rows of `status --json` by instance; none if the satellite does not answer."""
        if self.process.poll() is not None:
            fail(f"the satellite ended with exit code {self.process.returncode}")
        answer = self.ask("status", "--json")
        return {row["instance"]: row for row in json.loads(answer.stdout)} if answer.returncode == 0 else {}

    def all_online(self, count):
        def ready():
            rows = self.status()
            return rows if len(rows) == count and all(row["status"] == "online" for row in rows.values()) else None

        return wait_until(f"{count} servers online", ready)

    def back(self, instance, old_pid):
        def ready():
            row = self.status()[instance]
            return row if row["status"] == "online" and row["pid"] not in (None, old_pid) else None

        return wait_until(f"{instance} online with a pid other than {old_pid}", ready)

    def call(self, server, tool, arguments):
        answer = self.ask("call", server, tool, json.dumps(arguments))
        if answer.returncode != 0:
            fail(f"call {server} {tool}: exit {answer.returncode}: {answer.stderr.strip()}")
        return answer.stdout.strip()

    def events(self):
        answer = self.ask("events", "--json")
        if answer.returncode != 0:
            fail(f"events: exit {answer.returncode}: {answer.stderr.strip()}")
        return [json.loads(line) for line in answer.stdout.splitlines()]

    def left_over(self):
        """Returns the pids of all processes with the tag, the satellite included."""
        found = []
        for path in glob.glob("/proc/[0-9]*/environ"):
            try:
                with open(path, "rb") as environment:
                    if self.tag.encode() in environment.read().split(b"\0"):
                        found.append(int(path.split("/")[2]))
            except OSError:
                pass  # The process has ended or belongs to another user.
        return found

    def servers(self):
        """Returns the same without the satellite, its keeper and its spawn helper, whose environment only root can read."""
        with open(os.path.join(self.data_dir, "lock"), encoding="utf-8") as lock:
            ours = {self.process.pid, int(lock.read())}
        return [pid for pid in self.left_over() if pid not in ours and process_name(pid) != "satellite-spawn"]

    def end(self, others=()):
        """Sends SIGTERM and checks exit code 0 and that no process but `others` is left."""
        if not self.servers():
            fail("no process has the tag although servers run: the check for leftover processes does not work")
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            fail(f"the satellite did not end within {PATIENCE:.0f} s of SIGTERM")
        if code != 0:
            fail(f"the satellite ended with exit code {code} after SIGTERM; expected 0")
        if left := set(self.left_over()) - set(others):
            fail(f"processes are left after SIGTERM: {left}")


def process_name(pid):
    """Returns the name of a process, or None if it has ended."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8") as comm:
            return comm.read().strip()
    except OSError:
        return None


def program(servers, name):
    """Returns the path of a program that `.ci/install-servers` has installed, in any subdirectory."""
    found = glob.glob(f"{servers}/**/bin/{name}", recursive=True) or glob.glob(
        f"{servers}/**/.bin/{name}", recursive=True, include_hidden=True
    )
    if not found:
        fail(f"no program `{name}` in {servers}: run .ci/install-servers")
    return os.path.abspath(found[0])


def kill_one(satellite, instance):
    old_pid = satellite.status()[instance]["pid"]
    os.kill(old_pid, signal.SIGKILL)
    row = satellite.back(instance, old_pid)
    print(f"{instance}: killed {old_pid}; restarted as {row['pid']}, restarts: {row['restarts']}")


def demo():
    with tempfile.TemporaryDirectory() as directory, Satellite(directory, ["demo"]) as satellite:
        satellite.all_online(6)
        console = wait_until("the address of the console", lambda: re.search(r"http://(\S+)/console/", satellite.output()))
        connection = http.client.HTTPConnection(console[1], timeout=PATIENCE)
        connection.request("GET", "/console/login")
        if connection.getresponse().status != 200:
            fail(f"{console[0]} does not answer")
        print(f"{console[0]} answers")
        kill_one(satellite, "notes-acme-alice-n1")
        print(satellite.call("notes-acme-alice-n1", "echo", {"text": "hello"}))
        satellite.end()
        print("SIGTERM: exit 0, no process left")


def smoke(servers):
    with tempfile.TemporaryDirectory() as directory:
        config = os.path.join(directory, "mcp.json")
        with open(config, "w") as file:
            everything, clock = program(servers, "mcp-server-everything"), program(servers, "mcp-server-time")
            json.dump({"mcpServers": {"everything": {"command": everything}, "time": {"command": clock}}}, file)
        with Satellite(directory, ["run", "--mcp-json", config]) as satellite:
            for instance, row in satellite.all_online(2).items():
                print(f"{instance}: online, pid {row['pid']}, {row['tools']} tools")
            print(satellite.call("everything", "echo", {"message": "hello"}))
            print(satellite.call("time", "get_current_time", {"timezone": "Etc/UTC"}))
            kill_one(satellite, "everything-local-me-everything")
            print(satellite.call("everything", "echo", {"message": "hello again"}))
            satellite.end()
            print("SIGTERM: exit 0, no process left")


FLEET = """
[satellite]
name = "satellite-soak"

[policy.restart]
max_crashes = 100000
delays = ["0s", "50ms", "200ms"]

[policy.team]
max_exits = 100000

[servers.echo]
command = {program}
args = ["sim-server", "--name", "echo"]

[[teams]]
id = "one"
slug = "one"
users = [{{ id = "a", slug = "a" }}, {{ id = "b", slug = "b" }}, {{ id = "c", slug = "c" }}]

[[teams.installations]]
id = "e1"
server = "echo"

[[teams]]
id = "two"
slug = "two"
users = [{{ id = "d", slug = "d" }}, {{ id = "e", slug = "e" }}]

[[teams.installations]]
id = "e2"
server = "echo"

[[teams.installations]]
id = "b3"
server = "brittle"
command = {program}
args = ["sim-server", "--name", "brittle"]
policy = {{ restart = {{ max_crashes = 3, window = "1h" }} }}
users = ["d"]
"""
BRITTLE = "brittle-two-d-b3"
BRITTLE_BUDGET = 3


def kills(count, seconds, seed):
    chance = random.Random(seed)
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory:
        config = os.path.join(directory, "satellite.toml")
        with open(config, "w") as file:
            file.write(FLEET.format(program=json.dumps(os.path.abspath(ASK[0]))))
        with Satellite(directory, ["run", "--config", config]) as satellite:
            rows = satellite.all_online(6)
            killed, took, brittle, given_up = {name: 0 for name in rows}, [], 0, 0
            while sum(killed.values()) < count and time.monotonic() < until:
                name = chance.choice(sorted(rows))
                before = satellite.status()[name]
                os.kill(before["pid"], signal.SIGKILL)
                killed[name] += 1
                began = time.monotonic()
                brittle += name == BRITTLE
                if name == BRITTLE and brittle == BRITTLE_BUDGET:
                    wait_until(
                        f"{name} permanently_failed",
                        lambda: satellite.status()[BRITTLE]["status"] == "permanently_failed",
                    )
                    if satellite.ask("restart", name).returncode != 0:
                        fail(f"`restart {name}` does not clear permanently_failed")
                    brittle, given_up = 0, given_up + 1
                    continue
                after = satellite.back(name, before["pid"])
                took.append(time.monotonic() - began)
                if after["restarts"] != before["restarts"] + 1:
                    fail(f"{name}: {after['restarts']} restarts after one kill, {before['restarts']} before it")
                # Every instance has exactly one process.
                if (there := len(satellite.servers())) != len(rows):
                    fail(f"{there} processes for {len(rows)} servers")
            for name, row in satellite.all_online(6).items():
                satellite.call(name, "echo", {"text": name})
            events = satellite.events()
            if (numbers := [event["seq"] for event in events]) != list(range(1, len(numbers) + 1)):
                fail("the numbers of the events have a gap")
            crashed = sum(event["type"] == "mcp.server.crashed" for event in events)
            if crashed != sum(killed.values()):
                fail(f"{crashed} crash events for {sum(killed.values())} killed servers")
            satellite.end()
    took.sort()
    middle, worst = (took[len(took) // 2], took[-1]) if took else (0, 0)
    print(
        f"{sum(killed.values())} kills (seed {seed}): {len(took)} restarts (time until `status` showed them: "
        f"median {middle:.2f} s, longest {worst:.2f} s), {given_up} permanent failures as configured; "
        f"{len(events)} events, none missing; "
        "SIGTERM: exit 0, no process left"
    )
    if sum(killed.values()) < count:
        print(f"(ended by the time limit of {seconds:.0f} s before {count} kills)")


REMOTES = """
[policy.reconnect]
backoff_min = "200ms"
backoff_max = "2s"

[[teams]]
id = "one"
slug = "one"
users = [{{ id = "a", slug = "a" }}, {{ id = "b", slug = "b" }}]

[[teams.installations]]
id = "r1"
server = "everything"
transport = "http"
url = "http://127.0.0.1:{everything}/mcp"

[[teams.installations]]
id = "r2"
server = "python"
transport = "http"
url = "http://127.0.0.1:{python}/mcp"
"""


class Remote:
    """A remote server of this script, and the instances that connect to it."""

    def __init__(self, port, command, environment, instances, call):
        self.port, self.command, self.environment = port, command, environment
        self.instances, self.call, self.process = instances, call, None

    def start(self):
        self.process = subprocess.Popen(
            self.command, env={**os.environ, **self.environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

        def listens():
            if self.process.poll() is not None:
                fail(f"{self.command} ended with exit code {self.process.returncode}")
            with socket.socket() as knock:
                return knock.connect_ex(("127.0.0.1", self.port)) == 0

        wait_until(f"{self.command} listens", listens)

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def free_ports(count):
    """Returns ports below the ephemeral range, so that no client occupies them while a server is down."""
    found = []
    for port in random.sample(range(10_000, 30_000), 1000):
        with socket.socket() as knock:
            try:
                knock.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    fail(f"fewer than {count} free ports found")


def remotes(servers, count, seconds, seed):
    chance = random.Random(seed)
    until = time.monotonic() + seconds
    everything, python = free_ports(2)
    venv = f"{servers}/venv/bin/python"
    if not os.path.exists(venv):
        fail(f"`{venv}` does not exist: run .ci/install-servers")
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as ending:
        config = os.path.join(directory, "satellite.toml")
        with open(config, "w") as file:
            file.write(REMOTES.format(everything=everything, python=python))
        satellite = ending.enter_context(Satellite(directory, ["run", "--config", config]))
        tag = dict([satellite.tag.split("=")])
        fleet = [
            Remote(
                everything,
                [program(servers, "mcp-server-everything"), "streamableHttp"],
                {**tag, "PORT": str(everything)},
                ["everything-one-a-r1", "everything-one-b-r1"],
                ("echo", {"message": "hello"}),
            ),
            Remote(
                python,
                [venv, "-B", "tests/servers/python_sdk.py", str(python)],
                tag,
                ["python-one-a-r2", "python-one-b-r2"],
                ("greet", {"name": "Ada"}),
            ),
        ]
        for remote in fleet:
            ending.callback(remote.kill)
            remote.start()
        rows = satellite.all_online(4)
        kills, by_call = {name: 0 for name in rows}, 0

        def all_are(remote, what, wanted):
            def ready():
                rows = satellite.status()
                for other in fleet:
                    for name in () if other is remote else other.instances:
                        if rows[name]["status"] != "online":
                            fail(f"{name} is {rows[name]['status']} although its server was not killed")
                found = [rows[name] for name in remote.instances]
                for row in found:
                    if row["status"] in ("error", "requires_reauth", "permanently_failed") or row["restarts"]:
                        fail(f"wrong status: {row}")
                return all(wanted(row) for row in found)

            wait_until(f"{remote.instances} {what}", ready)

        def is_back(row):
            return (row["status"], row["connection"], row["attempt"]) == ("online", "connected", None)

        def is_away(row):
            away = (row["status"], row["connection"]) == ("offline", "reconnecting")
            return away and row["status_message"].startswith("Server unreachable: ")

        while sum(kills.values()) < count and time.monotonic() < until:
            remote = chance.choice(fleet)
            remote.kill()
            for name in remote.instances:
                kills[name] += 1
            all_are(remote, "offline", is_away)
            refused = satellite.ask("call", remote.instances[0], remote.call[0], json.dumps(remote.call[1]), "--json")
            error = json.loads(refused.stdout or "{}").get("error", {})
            if refused.returncode != 1 or error.get("status") != "reconnecting":
                result = f"exit {refused.returncode}: {refused.stdout}{refused.stderr}"
                fail(f"unexpected result of a call while the server is down: {result}")
            remote.start()
            if chance.random() < 0.5:
                by_call += 1
                for name in remote.instances:
                    satellite.call(name, *remote.call)
            all_are(remote, "online", is_back)
            for name in remote.instances:
                satellite.call(name, *remote.call)
        events = satellite.events()
        for kind in ["disconnected", "reconnected"]:
            told = {name: 0 for name in kills}
            for event in events:
                if event["type"] == f"mcp.server.{kind}":
                    told[event["data"]["process_id"]] += 1
            if told != kills:
                fail(f"{kind}: {told} events for {kills} lost connections")
        if (numbers := [event["seq"] for event in events]) != list(range(1, len(numbers) + 1)):
            fail("the numbers of the events have a gap")
        satellite.end([remote.process.pid for remote in fleet])
    print(
        f"{sum(kills.values())} connections lost by kills of 2 real servers (seed {seed}): all restored, {by_call} times "
        f"by calls; {len(events)} events, none missing; SIGTERM: exit 0, no process left"
    )
    if sum(kills.values()) < count:
        print(f"(ended by the time limit of {seconds:.0f} s before {count} lost connections)")


FLOOD = """
[[teams]]
id = "one"
slug = "one"
users = [{{ id = "a", slug = "a" }}]

[[teams.installations]]
id = "q1"
server = "quiet"
command = {program}
args = ["sim-server", "--name", "quiet"]

[[teams.installations]]
id = "f2"
server = "flooding"
command = {program}
args = ["sim-server", "--name", "flooding", "--stderr-bytes-per-second", "100000000"]
"""
FLOOD_GOAL = 2.0


class Socket(http.client.HTTPConnection):
    """A connection to the control socket that stays open, so that timed calls start no process."""

    def __init__(self, data_dir):
        super().__init__("satellite")
        self.path = os.path.join(data_dir, "control.sock")

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)

    def call(self, server, tool):
        body = json.dumps({"selector": {"server": server}, "tool": tool, "arguments": {"text": "hello"}})
        self.request("POST", "/v1/call", body, {"content-type": "application/json"})
        answer = self.getresponse()
        text = answer.read()
        if answer.status != 200:
            fail(f"call {server} {tool}: {answer.status}: {text!r}")

    def latencies(self, server, seconds):
        """Makes sequential calls for `seconds` and returns their latencies in ms, sorted."""
        took, until = [], time.monotonic() + seconds
        while (began := time.monotonic()) < until:
            self.call(server, "echo")
            took.append((time.monotonic() - began) * 1000)
        return sorted(took)


def of_process(pid, file, key):
    with open(f"/proc/{pid}/{file}") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key))


def flood(seconds):
    with tempfile.TemporaryDirectory() as directory:
        config = os.path.join(directory, "satellite.toml")
        with open(config, "w") as file:
            file.write(FLOOD.format(program=json.dumps(os.path.abspath(ASK[0]))))
        with Satellite(directory, ["run", "--config", config]) as satellite:
            satellite.all_online(2)
            if satellite.ask("stop", "flooding").returncode != 0:
                fail("`stop flooding` fails")
            with open(os.path.join(satellite.data_dir, "lock")) as lock:
                own = int(lock.read())
            control = Socket(satellite.data_dir)
            control.latencies("quiet", 1)
            before, rss_before = control.latencies("quiet", seconds / 2), of_process(own, "status", "VmRSS")
            if satellite.ask("start", "flooding").returncode != 0:
                fail("`start flooding` fails")
            pid = satellite.status()["flooding-one-a-f2"]["pid"]
            began, said = time.monotonic(), of_process(pid, "io", "wchar")
            during = control.latencies("quiet", seconds)
            rate = (of_process(pid, "io", "wchar") - said) / (time.monotonic() - began) / 1e6
            rss_during = of_process(own, "status", "VmRSS")
            if satellite.ask("stop", "flooding").returncode != 0:
                fail("`stop flooding` fails")
            after = control.latencies("quiet", seconds / 2)
            control.close()
            satellite.end()
    half, most = (lambda took: took[len(took) // 2]), (lambda took: took[len(took) * 99 // 100])
    ratio = half(during) / half(before)
    print(f"flood of {rate:.0f} MB/s for {seconds:.0f} s on {os.cpu_count()} cores:")
    for name, took in [("before", before), ("during", during), ("after", after)]:
        print(f"  calls {name}: p50 {half(took):.3f} ms, p99 {most(took):.3f} ms, {len(took)} calls")
    print(f"  p50 during / before: {ratio:.2f} (goal: {FLOOD_GOAL:.0f}{'' if ratio <= FLOOD_GOAL else ', MISSED'})")
    print(f"  memory of the satellite: {rss_before / 1024:.1f} MiB before, {rss_during / 1024:.1f} MiB during")


WATCH = '''
[gateway]
listen = "127.0.0.1:{port}"

[telemetry]
listen = "127.0.0.1:{metrics}"
'''
WATCH_INSTALLATIONS = 20
WATCH_USERS = 5
# Reconnects per second while watchers are measured, at most.
WATCH_RECONNECTS = 100


def watch(count, seconds):
    port, metrics = free_ports(2)
    each = WATCH_INSTALLATIONS * WATCH_USERS
    if count % each:
        fail(f"the number of instances must be a multiple of {each}")
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as ending:
        server = subprocess.Popen([*ASK, "sim-server", "--http", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
        ending.callback(server.wait)
        ending.callback(server.kill)
        url = server.stdout.readline().rsplit(" ", 1)[1].strip()
        config = os.path.join(directory, "satellite.toml")
        with open(config, "w") as file:
            file.write(WATCH.format(port=port, metrics=metrics))
            for team in range(count // each):
                users = ", ".join(f'{{ id = "u{user}", slug = "u{user}" }}' for user in range(WATCH_USERS))
                file.write(f'[[teams]]\nid = "t{team}"\nslug = "t{team}"\nusers = [{users}]\n')
                for nth in range(WATCH_INSTALLATIONS):
                    file.write(
                        f'[[teams.installations]]\nid = "i{team}-{nth}"\nserver = "s{nth}"\n'
                        f'transport = "http"\nurl = "{url}"\n'
                    )
        began = time.monotonic()
        satellite = ending.enter_context(Satellite(directory, ["run", "--config", config]))
        # The status checks that the process has not ended.
        token_file = os.path.join(satellite.data_dir, "console-token")
        wait_until("the console token", lambda: satellite.status() is not None and os.path.exists(token_file))
        with open(token_file) as token:
            headers = {"authorization": "Bearer " + token.read().strip()}

        def get(path, to=port):
            connection = http.client.HTTPConnection("127.0.0.1", to, timeout=PATIENCE)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            if answer.status != 200:
                fail(f"GET {path}: {answer.status}: {answer.read()!r}")
            return connection, answer

        def online():
            connection, answer = get("/v1/satellite")
            counts = json.load(answer)["instances"]
            connection.close()
            return counts.get("online") == count

        wait_until("the endpoint", lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        wait_until(f"{count} instances online", online, 600)
        with open(os.path.join(satellite.data_dir, "lock")) as lock:
            own = int(lock.read())
        print(f"{count} remote instances online after {time.monotonic() - began:.0f} s; "
              f"memory of the satellite {of_process(own, 'status', 'VmRSS') / 1024:.0f} MiB")

        def cpu():
            with open(f"/proc/{own}/stat") as stat:
                fields = stat.read().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

        def first_byte(path):
            since = time.monotonic()
            connection, answer = get(path)
            size = len(answer.read())
            connection.close()
            return (time.monotonic() - since) * 1000, size

        pages = sorted(first_byte("/console/") for _ in range(5))
        print(f"page of the overview: median {pages[2][0]:.0f} ms, {pages[2][1]} bytes")
        scrapes = []
        for _ in range(5):
            since = time.monotonic()
            connection, answer = get("/metrics", metrics)
            size = len(answer.read())
            scrapes.append(((time.monotonic() - since) * 1000, size))
            connection.close()
            time.sleep(1.1)  # A second scrape within a second gets the same text.
        scrapes.sort()
        print(f"scrape: median {scrapes[2][0]:.0f} ms, {scrapes[2][1]} bytes (goals: 50 ms, 5 MB)")

        stop, reconnected = threading.Event(), [0]

        def reconnect():
            chance, control = random.Random(1), http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            while not stop.is_set():
                name = f"s{chance.randrange(WATCH_INSTALLATIONS)}"
                team = chance.randrange(count // each)
                user = chance.randrange(WATCH_USERS)
                path = f"/v1/instances/{name}-t{team}-u{user}-i{team}-{name[1:]}/reconnect"
                control.request("POST", path, "{}", {**headers, "content-type": "application/json"})
                answer = control.getresponse()
                text = answer.read()
                if answer.status != 200:
                    print(f"POST {path}: {answer.status}: {text!r}", file=sys.stderr)
                    stop.set()
                reconnected[0] += 1
                time.sleep(1 / WATCH_RECONNECTS)

        def drain(connection, answer):
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, AttributeError):
                while answer.read1(1 << 20):
                    pass

        threads = [threading.Thread(target=reconnect, daemon=True)]
        threads[0].start()
        shares = {}
        for watchers in [0, 1, 50]:
            streams = [get("/v1/instances/stream") for _ in range(watchers)]
            readers = [threading.Thread(target=drain, args=stream, daemon=True) for stream in streams]
            for reader in readers:
                reader.start()
            time.sleep(2)  # The first event contains all instances.
            since, before, changes = time.monotonic(), cpu(), reconnected[0]
            time.sleep(seconds)
            lasted = time.monotonic() - since
            shares[watchers] = (cpu() - before) / lasted
            print(f"{watchers} watchers: {shares[watchers] * 100:.1f} % of a core, "
                  f"{(reconnected[0] - changes) / lasted:.0f} reconnects per second")
            for connection, _ in streams:
                with contextlib.suppress(OSError):
                    connection.sock and connection.sock.shutdown(socket.SHUT_RDWR)
            for reader in readers:
                reader.join(5)
        stop.set()
        threads[0].join()
        for watchers, goal in [(1, 0.10), (50, 1.0)]:
            cost = shares[watchers] - shares[0]
            missed = "" if cost <= goal else ", MISSED"
            print(f"cost of {watchers} watchers: {cost * 100:.1f} % of a core (goal: {goal * 100:.0f} %{missed})")
        satellite.process.send_signal(signal.SIGTERM)
        satellite.process.wait(PATIENCE)


def main():
    match sys.argv[1:]:
        case ["demo"]:
            demo()
        case ["smoke", servers]:
            smoke(servers)
        case ["kills", count, seconds]:
            kills(int(count), float(seconds), int(os.environ.get("SEED", time.time())))
        case ["remotes", servers, count, seconds]:
            remotes(servers, int(count), float(seconds), int(os.environ.get("SEED", time.time())))
        case ["flood", seconds]:
            flood(float(seconds))
        case ["watch", count, seconds]:
            watch(int(count), float(seconds))
        case _:
            sys.exit(__doc__)


main()
