"""An MCP server for the tests of the console: tools that ask, report progress and draw, and hostile text in every field."""
import itertools
import json
import sys
import threading
import time

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">\u202e\u0007"\'&</textarea>'
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAoAAAAKCAIAAAACUFjqAAAAEklEQVR4nGNgYPiPB41Ko5BEAADIjgJ/CZLbZAAAAABJRU5ErkJggg=="
SVG = "PHN2ZyB4bWxucz0iaHR0cDovL3d3dy53My5vcmcvMjAwMC9zdmciIG9ubG9hZD0iYWxlcnQoMSkiLz4="
lock = threading.Lock()
answers = {}
cancelled = set()
requests = itertools.count()


def send(message):
    with lock:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def ask(method, params):
    request = f"q{next(requests)}"
    answers[request] = threading.Event()
    send({"id": request, "method": method, "params": params})
    answers[request].wait(100)
    return answers[request].answer


def schema(**properties):
    return {"type": "object", "properties": properties, "required": [name for name in properties]}


TOOLS = [
    {"name": "paint", "description": "Draws.", "inputSchema": schema()},
    {"name": "slow", "description": "Reports progress.", "inputSchema": schema(steps={"type": "integer", "default": 5})},
    {"name": "ask", "description": "Asks the user.", "inputSchema": schema()},
    {"name": "think", "description": "Asks a model.", "inputSchema": schema()},
    {"name": "types", "description": "Returns its arguments.", "inputSchema": {
        "type": "object", "required": ["word"], "properties": {
            "word": {"type": "string"}, "count": {"type": "integer"}, "flag": {"type": "boolean"},
            "color": {"enum": ["red", "green"]}, "list": {"type": "array"}, "deep": {"type": "object"}}}},
    {"name": "twice", "description": "Asks two questions at once.", "inputSchema": schema()},
    {"name": "forms", "description": "Returns its arguments.", "inputSchema": {
        "type": "object", "required": ["anything", "empty", "place"],
        "$defs": {
            "Color": {"type": "string", "enum": ["red", "green"]},
            "Place": {"type": "object", "required": ["x"], "properties": {"x": {"type": "integer"}}},
            "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "name": {"type": "string"}}},
            "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]}},
        "properties": {
            "anything": {},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "shade": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}], "default": None},
            "mixed": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "either": {"oneOf": [{"type": "string"}, {"type": "object"}]},
            "place": {"$ref": "#/$defs/Place"},
            "node": {"$ref": "#/$defs/Node"},
            "colors": {"type": "array", "items": {"$ref": "#/$defs/Color"}},
            "big": {"type": "integer"},
            "positive": {"type": "number", "exclusiveMinimum": 0},
            "loop": {"$ref": "#/$defs/Loop"},
            "empty": {"type": "string"}}}},
    {"name": "evil", "title": EVIL, "description": EVIL, "inputSchema": schema()},
    {"name": EVIL, "description": EVIL * 2000, "inputSchema": {"type": "object", "properties": {EVIL: {"type": "string", "description": EVIL, "default": EVIL}}}},
]


def call(request, name, arguments, meta):
    text = lambda value: [{"type": "text", "text": value}]
    if name == "paint":
        content = [{"type": "image", "mimeType": "image/png", "data": PNG}, *text('{"a": [1, 2]}'), *text("plain")]
    elif name == "slow":
        for step in range(arguments.get("steps", 5)):
            if request in cancelled:
                print("cancelled", request, file=sys.stderr, flush=True)
                return
            send({"method": "notifications/progress", "params": {
                "progressToken": meta["progressToken"], "progress": step, "total": arguments["steps"], "message": f"step {step}"}})
            time.sleep(0.05)
        content = text("done")
    elif name == "ask":
        answer = ask("elicitation/create", {"message": "Who are you? " + EVIL, "requestedSchema": schema(
            name={"type": "string", "title": "Name"}, age={"type": "integer"})})
        content = text(json.dumps(answer, sort_keys=True))
    elif name == "think":
        answer = ask("sampling/createMessage", {"maxTokens": 10, "messages": [
            {"role": "user", "content": {"type": "text", "text": "two and two?"}}]})
        content = text(json.dumps(answer, sort_keys=True))
    elif name == "twice":
        given = {}

        def question(word):
            given[word] = ask("elicitation/create", {"message": word, "requestedSchema": {"type": "object", "properties": {
                "name": {"type": "string"}, "data": {"type": "object"}}}})

        threads = [threading.Thread(target=question, args=(word,), daemon=True) for word in ("one?", "two?")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        content = text(json.dumps(given, sort_keys=True))
    elif name in ("types", "forms"):
        content = text(json.dumps(arguments, sort_keys=True))
    else:
        content = [
            *text(EVIL), *text("x" * 1_000_000), {"type": "image", "mimeType": "image/svg+xml", "data": SVG},
            {"type": "image", "mimeType": 'image/png"><script>alert(3)</script>', "data": '"><script>alert(4)</script>'},
            {"type": EVIL, "uri": "javascript:alert(5)"}, {"type": "resource_link", "uri": "javascript:alert(6)", "name": EVIL}]
    send({"id": request, "result": {"content": content}})


print(EVIL, file=sys.stderr)
print("a" * 1_000_000, file=sys.stderr, flush=True)
for line in sys.stdin:
    message = json.loads(line)
    request, method, params = message.get("id"), message.get("method"), message.get("params", {})
    if method == "initialize":
        send({"id": request, "result": {
            "protocolVersion": params["protocolVersion"], "serverInfo": {"name": EVIL, "version": EVIL},
            "instructions": EVIL, "capabilities": {"tools": {}, "resources": {}, "prompts": {}}}})
    elif method == "tools/list":
        send({"id": request, "result": {"tools": TOOLS}})
    elif method == "resources/list":
        send({"id": request, "result": {"resources": [{"uri": "javascript:alert(7)", "name": EVIL, "description": EVIL}]}})
    elif method == "resources/templates/list":
        send({"id": request, "result": {"resourceTemplates": []}})
    elif method == "prompts/list":
        send({"id": request, "result": {"prompts": [{"name": EVIL, "description": EVIL}]}})
    elif method == "tools/call":
        arguments = (request, params["name"], params.get("arguments", {}), params.get("_meta", {}))
        threading.Thread(target=call, args=arguments, daemon=True).start()
    elif method == "notifications/cancelled":
        cancelled.add(params["requestId"])
    elif method == "ping":
        send({"id": request, "result": {}})
    elif method is None and request in answers:
        answers[request].answer = message.get("result", message.get("error"))
        answers[request].set()
    elif request is not None:
        send({"id": request, "error": {"code": -32601, "message": EVIL}})
