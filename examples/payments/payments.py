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
        self.ids = []

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

    def work(self, limit, done):
        """Has a worker work until that is so and the queue is empty, then ends it."""
        deadline = time.monotonic() + DEADLINE
        while True:
            self.worker(limit, done, deadline)
            # What it had in its hands when it was told to end it may have put off.
            if self.broker.length(self.queue) == 0:
                return

    def worker(self, limit, done, deadline):
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
            while not (done() and self.broker.length(self.queue) == 0):
                check(process.poll() is None, f"the worker ended by itself, with {process.returncode}")
                check(time.monotonic() < deadline, f"not done after {DEADLINE} s")
                time.sleep(0.05)
            process.terminate()
            try:
                code = process.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                raise Deviation(f"the worker did not end within {DEADLINE} s of SIGTERM")
            check(code == 0, f"the worker ended with {code} on SIGTERM")
        finally:
            process.kill()
            process.wait()

    def story(self):
        body, charge = self.payment(9_990)
        self.produce(body, body)
        self.work(LIMIT, done=lambda: charge in self.charged())
        self.expect("one payment, produced twice", [charge], dead=0)

        # To a new process.
        self.produce(body)
        self.work(LIMIT, done=lambda: True)
        self.expect("the same bytes again, after a restart", [charge], dead=0)

        failing, late_charge = self.payment(2 * LIMIT)
        self.produce(failing)
        self.work(LIMIT, done=lambda: self.broker.length(self.dead) == 1)
        self.expect("a payment above the limit", [charge], dead=1)

        moved = [(item.message_id, item.reason, item.to, item.redriven) for item in self.redrive()]
        expected = [(self.ids[1], "failed", self.queue, True)]
        check(moved == expected, f"the redrive moved {moved}, not {expected}")
        lengths = self.broker.length(self.dead), self.broker.length(self.queue)
        check(lengths == (0, 1), f"after the redrive, {lengths} on the dead-letter queue and the queue")

        self.work(2 * LIMIT, done=lambda: late_charge in self.charged())
        self.expect("redriven, with a higher limit", [charge, late_charge], dead=0)

        self.produce(body, failing)
        self.work(LIMIT, done=lambda: True)
        self.expect("both once more, with the old limit", [charge, late_charge], dead=0)

    def expect(self, what, charges, dead):
        charged, on_dead = self.charged(), self.broker.length(self.dead)
        check(charged == charges, f"{what}: charged {charged}, not {charges}")
        check(on_dead == dead, f"{what}: {on_dead} on the dead-letter queue, not {dead}")
        print(f"{what}: {len(charged)} charged, {on_dead} dead-lettered")

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
    # So that what is to be removed at the end is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        workers = build()
    except Deviation as error:
        print(f"payments: {error}", file=sys.stderr)
        return 1
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
                print(f"payments: {name}: {type(error).__name__}: {error}", file=sys.stderr)
                if run.err.exists():
                    print("the worker said:", run.err.read_text()[-4000:], sep="\n", file=sys.stderr)
                return 1
    print("payments: ok")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
