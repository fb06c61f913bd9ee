"""Has payments produced, charged, dead-lettered and redriven, and checks each step. Started by run.sh."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import closing
from pathlib import Path

try:
    import pika
    import redis
    from babelqueue import EnvelopeCodec
    from babelqueue.redrive import redrive
    from babelqueue.transport import make_transport
except ImportError as error:
    sys.exit(f"payments: {sys.executable} has not what 'babelqueue[redis,amqp]==1.24.*' brings: {error}")

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379")
RABBITMQ_URL = os.environ.get("RABBITMQ_URL", "amqp://127.0.0.1:5672")
LIMIT = 100_000
# For each step, in seconds. A copy that came while the first one was being charged is put off for some of them.
DEADLINE = 60
# Those that came, looked at between two polls: an exception from a handler can get lost inside of pika.
signals = []


class Deviation(Exception):
    """Something is not as it should be."""


def check(holds, otherwise):
    if not holds:
        raise Deviation(otherwise)


def build():
    """The two workers, by name."""
    command = "cargo build --features cli,tracing --example redis_worker --example rabbitmq_worker"
    command += " --message-format json-render-diagnostics"
    root = Path(__file__).resolve().parents[2]
    built = subprocess.run(command.split(), cwd=root, stdout=subprocess.PIPE)
    check(built.returncode == 0, "the workers do not build")
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    return {m["target"]["name"]: m["executable"] for m in messages if m.get("executable")}


class Redis:
    worker, url = "redis_worker", REDIS_URL

    def length(self, queue):
        """How many messages are on a queue, in somebody's hands, or put off."""
        with redis.Redis.from_url(self.url) as client, client.pipeline() as both:
            return sum(both.llen(queue).llen(f"{queue}:processing").execute())

    def remove(self, queue):
        with redis.Redis.from_url(self.url) as client:
            client.delete(queue, f"{queue}:processing", f"{queue}:processing:deadlines")


class RabbitMq:
    worker, url = "rabbitmq_worker", RABBITMQ_URL

    def names(self, queue):
        # First those from which messages come back, so that none is missed on its way.
        return [f"{queue}.later.{250 << n}" for n in range(9)] + [queue]

    def length(self, queue):
        """How many messages are on a queue, or put off; those in somebody's hands are not seen."""
        with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            return sum(self.ready(connection, name) for name in self.names(queue))

    def ready(self, connection, name):
        channel = connection.channel()
        try:
            return channel.queue_declare(name, passive=True).method.message_count
        except pika.exceptions.ChannelClosedByBroker as error:
            if error.reply_code != 404:
                raise
            return 0

    def remove(self, queue):
        with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            channel = connection.channel()
            for name in self.names(queue):
                channel.queue_delete(name)


class Run:
    """One broker's story, on a queue and a record that nobody else has."""

    def __init__(self, broker, executable, logs):
        self.broker, self.executable = broker, executable
        self.queue = f"payments-{uuid.uuid4().hex}"
        self.dead = f"{self.queue}.dlq"
        self.record = f"{self.queue}:seen:"
        self.out, self.err = Path(logs, "out"), Path(logs, "err")
        self.ids, self.step = [], "producing"

    def payment(self, cents):
        """The bytes of a new one, and the line that says that it was charged."""
        envelope = EnvelopeCodec.make("urn:shop:payment", {"cents": cents}, queue=self.queue)
        self.ids.append(envelope["meta"]["id"])
        return EnvelopeCodec.encode(envelope), f'charged {cents} cents: Some("{self.ids[-1]}")'

    def produce(self, *bodies):
        with closing(make_transport(self.broker.url)) as transport:
            for body in bodies:
                transport.publish(self.queue, body)

    def redrive(self):
        with closing(make_transport(self.broker.url)) as transport:
            return redrive(transport, self.dead, timeout=0).items

    def charged(self):
        """All that was charged so far, by any worker."""
        return [line for line in self.out.read_text().splitlines() if line.startswith("charged ")]

    def story(self):
        body, charge = self.payment(9_990)
        self.produce(body, body)
        self.work("one payment, produced twice", LIMIT, [charge])

        # To a new process, as each time.
        self.produce(body)
        self.work("the same bytes again, after a restart", LIMIT, [charge])

        failing, late_charge = self.payment(2 * LIMIT)
        self.produce(failing)
        self.work("a payment above the limit", LIMIT, [charge], dead=1)

        self.step = "the redrive"
        moved = [(item.message_id, item.reason, item.to, item.redriven) for item in self.redrive()]
        expected = [(self.ids[1], "failed", self.queue, True)]
        check(moved == expected, f"moved {moved}, not {expected}")
        lengths = self.broker.length(self.dead), self.broker.length(self.queue)
        check(lengths == (0, 1), f"left {lengths} on the dead-letter queue and the queue, not (0, 1)")
        self.work("redriven, with a higher limit", 2 * LIMIT, [charge, late_charge])

        self.produce(body, failing)
        self.work("both once more, with the old limit", LIMIT, [charge, late_charge])

    def work(self, step, limit, charges, dead=0):
        """Has a worker work until the queue is empty, and checks what came of it."""
        self.step = step
        deadline = time.monotonic() + DEADLINE

        def found():
            return self.charged(), self.broker.length(self.dead), self.broker.length(self.queue)

        def done():
            charged, on_dead, left = found()
            if time.monotonic() > deadline:
                raise Deviation(f"not done after {DEADLINE} s: charged {charged}, {on_dead} dead, {left} left")
            return len(charged) >= len(charges) and on_dead >= dead and left == 0

        self.worker(limit, done)
        # What it had in its hands when it was told to end it may have put off.
        while self.broker.length(self.queue) > 0:
            self.worker(limit, done)
        expected = charges, dead, 0
        check(found() == expected, f"charged, dead and left are {found()}, not {expected}")
        print(f"{step}: {len(charges)} charged, {dead} dead-lettered")

    def worker(self, limit, done):
        """Has a worker work until that is so, then ends it, which is to go well."""
        settings = {
            "BROKER_URL": self.broker.url,
            "STORE_URL": REDIS_URL,
            "RECORD": self.record,
            "QUEUE": self.queue,
            "LIMIT": str(limit),
        }
        with self.out.open("a") as out, self.err.open("a") as err:
            env = {**os.environ, **settings}
            process = subprocess.Popen([self.executable], stdout=out, stderr=err, env=env)
        try:
            while not done():
                check(not signals, "interrupted")
                check(process.poll() is None, f"the worker ended by itself, with {process.returncode}")
                time.sleep(0.05)
            process.terminate()
            code = process.wait(DEADLINE)
            check(code == 0, f"the worker ended with {code} on SIGTERM, not with 0")
        except subprocess.TimeoutExpired:
            raise Deviation(f"the worker did not end within {DEADLINE} s of SIGTERM")
        finally:
            process.kill()
            process.wait()

    def remove(self):
        self.broker.remove(self.queue)
        self.broker.remove(self.dead)
        with redis.Redis.from_url(REDIS_URL) as client:
            client.delete(*[self.record + id for id in self.ids])


def main(names):
    brokers = {"redis": Redis(), "rabbitmq": RabbitMq()}
    unknown = [name for name in names if name not in brokers]
    if unknown:
        print(f"payments: {unknown[0]!r} is no broker; expected {' or '.join(brokers)}", file=sys.stderr)
        return 2
    try:
        workers = build()
    except Deviation as error:
        print(f"payments: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    for name in names or brokers:
        print(f"== {name}")
        with tempfile.TemporaryDirectory() as logs:
            run = Run(brokers[name], workers[brokers[name].worker], logs)
            try:
                try:
                    run.story()
                finally:
                    run.remove()
            except (Deviation, redis.RedisError, pika.exceptions.AMQPError) as error:
                print(f"payments: {name}: {run.step}: {str(error) or repr(error)}", file=sys.stderr)
                if run.err.exists() and run.err.stat().st_size > 0:
                    print("its workers said:", run.err.read_text()[-4000:], sep="\n", file=sys.stderr)
                return 128 + signals[0] if signals else 1
    print("payments: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
