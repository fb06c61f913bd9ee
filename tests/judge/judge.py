"""The other side of tests/judge.rs: what BabelQueue's published Python SDK makes of a body.

A line of JSON comes in, a line of JSON goes out. The first line out names the package's version.
"""

import json
import logging
import sys

try:
    from importlib.metadata import version

    from babelqueue._poison_record import build_poison_record
    from babelqueue.codec import EnvelopeCodec
    from babelqueue.dead_letter import annotate

    greeting = {"version": version("babelqueue")}
except ImportError as error:
    greeting = {"absent": str(error)}

META = ("id", "queue", "lang", "schema_version", "created_at")


class Pointers(logging.Handler):
    """Collects the pointers of the keys that decode warns of."""

    def emit(self, record):
        dropped = record.msg.startswith("Dropped")
        self.seen.add(record.args[0] if dropped else "/job")


pointers = Pointers()
logger = logging.getLogger("babelqueue.codec")
logger.addHandler(pointers)
logger.propagate = False


def decode(text):
    """The SDK's own reading of a body, or None for poison."""
    pointers.seen = set()
    if EnvelopeCodec.poison_cause(text) is not None:
        return None
    return EnvelopeCodec.decode(text)


def canonical(value):
    """A text that is the same for the same JSON value, and tells 1, 1.0 and true apart."""
    return json.dumps(value, sort_keys=True)


def without_nulls(block, keys, notes):
    nulls = [key for key in keys if key in block and block[key] is None]
    if nulls:
        notes.add("null")
    return {key: value for key, value in block.items() if key not in nulls}


def normalised(envelope):
    """An envelope as the Rust side writes it, and what had to be done for that."""
    notes = set()
    out = without_nulls(envelope, ("trace_id", "data", "meta", "attempts", "dead_letter"), notes)
    if "meta" not in out:
        notes.add("meta")
        out["meta"] = {}
    out["meta"] = without_nulls(out["meta"], META, notes)
    if "attempts" not in out:
        notes.add("attempts")
        out["attempts"] = 0
    if "dead_letter" in out:
        block = without_nulls(
            out["dead_letter"], ("reason", "failed_at", "attempts", "lang"), notes
        )
        for key in ("error", "exception", "original_queue"):
            if key not in block:
                notes.add("block")
                block[key] = None
        out["dead_letter"] = block
    return out, notes


def compare(theirs, own):
    """What makes the two differ: nothing, what `normalised` mends, or a failure in words."""
    value = decode(theirs)
    if value is None:
        return ["poison: " + EnvelopeCodec.poison_cause(theirs)]
    if canonical(value) == canonical(own):
        return []
    mended, notes = normalised(own)
    if canonical(value) == canonical(mended):
        return sorted(notes)
    return ["differs: " + canonical(own)]


def wire(envelope):
    """An envelope as the SDK sends it, in hex, or None when it cannot be sent."""
    try:
        return EnvelopeCodec.encode(envelope).encode("utf-8").hex()
    except UnicodeEncodeError:
        return None


def shown(text):
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


class Judge:
    def body(self, request):
        text = bytes.fromhex(request["body"]).decode("utf-8", "surrogateescape")
        record = build_poison_record(text, json.loads(request["block"]))
        answer = {"record": record == request["record"], "decoded": False}
        self.own = decode(text)
        if self.own is None:
            answer["cause"] = EnvelopeCodec.poison_cause(text)
            return answer
        meta = self.own.get("meta") or {}
        answer.update(
            decoded=True,
            urn=shown(EnvelopeCodec.urn(self.own)),
            id=shown(meta.get("id")),
            accepts=EnvelopeCodec.accepts(self.own),
            warnings=sorted(pointers.seen),
            encoded=wire(self.own),
        )
        if request["encoded"] is None:
            return answer
        block = json.loads(request["annotated"])["dead_letter"]
        self.annotated = annotate(
            self.own,
            "failed",
            meta.get("queue") or request["received"],
            self.own.get("attempts") or 0,
            error=request["error"],
            lang="rust",
        )
        self.annotated["dead_letter"]["failed_at"] = block["failed_at"]
        member = ',"dead_letter":' + EnvelopeCodec.encode(self.annotated["dead_letter"])
        answer.update(
            read=compare(request["encoded"], self.own),
            read_annotated=compare(request["annotated"], self.annotated),
            block=member in request["annotated"],
            annotated=wire(self.annotated),
        )
        return answer

    def again(self, request):
        return {
            "read": compare(request["encoded"], self.own),
            "read_annotated": compare(request["annotated"], self.annotated),
        }


judge = Judge()
print(json.dumps(greeting), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    answer = judge.body(request) if "body" in request else judge.again(request)
    print(json.dumps(answer), flush=True)
