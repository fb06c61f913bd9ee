#!/usr/bin/env bash
# Payments across languages, on Redis and then on RabbitMQ: BabelQueue's Python SDK produces them, the workers of
# examples/redis_worker.rs and examples/rabbitmq_worker.rs charge them, and the SDK's own redrive brings back the one
# that failed. What is expected at each step is in payments.py, which checks it; exit code 0 when all of it held.
#
#   examples/payments/run.sh                # both; or one of: redis, rabbitmq
#
# Needs the two servers: REDIS_URL (redis://127.0.0.1:6379; keeps the record as well), RABBITMQ_URL
# (amqp://127.0.0.1:5672). BABELQUEUE_PYTHON is a Python that has the SDK with its extras `redis` and `amqp`; without
# it, one is made for this run. Queues and keys have names of their own, and are removed at the end.
set -euo pipefail

python=${BABELQUEUE_PYTHON:-}
if [[ -z $python ]]; then
  venv=$(mktemp -d)
  trap 'rm -rf "$venv"' EXIT
  python3 -m venv "$venv"
  python=$venv/bin/python
  "$python" -m pip install --quiet --disable-pip-version-check 'babelqueue[redis,amqp]==1.24.*'
fi
"$python" "$(dirname "${BASH_SOURCE[0]}")/payments.py" "$@"
