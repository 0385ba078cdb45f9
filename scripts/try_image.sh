#!/usr/bin/env bash
# try_image.sh IMAGE: starts a container image as docs/how-to/deploy-with-docker.md restricts it, on the CPU: a server of it answers a
# question, and its health check passes. Needs Docker.
set -euo pipefail

image=$1
here=$(realpath "$(dirname "$0")/..")
restricted=(--init --read-only --tmpfs /tmp --cap-drop ALL)

docker run --rm "${restricted[@]}" --volume "$here/tests/wheel/answer_a_question.py:/answer_a_question.py:ro" \
  --entrypoint python "$image" /answer_a_question.py

container=$(docker run --detach "${restricted[@]}" "$image" --device cpu)
trap 'docker rm --force "$container" >/dev/null' EXIT
for _ in {1..120}; do
  state=$(docker inspect --format '{{.State.Status}} {{.State.Health.Status}}' "$container")
  case $state in
    "running healthy") echo "$image: $state"; exit 0 ;;
    running*) sleep 2 ;;
    *) break ;;
  esac
done
docker logs "$container" >&2
echo "error: $image: $state" >&2
exit 1
