#!/usr/bin/env bash
# try_image.sh IMAGE: starts a container image as docs/how-to/deploy-with-docker.md restricts it, on the CPU. A server of it answers a
# question, as the image's user and as a number that has no name (--user, OpenShift); its health check passes beside a proxy that is not
# there, and it ends at the first signal. DOCKER=podman: by another program with Docker's commands.
set -euo pipefail

image=$1
docker=${DOCKER:-docker}
here=$(realpath "$(dirname "$0")/..")
restricted=(--read-only --tmpfs /tmp --cap-drop ALL)

for user in 10001 1000910000:0; do
  "$docker" run --rm --init "${restricted[@]}" --user "$user" --volume "$here/tests/wheel/answer_a_question.py:/answer_a_question.py:ro" \
    --entrypoint python "$image" /answer_a_question.py
done

# Without --init: the server is the first process, for which the kernel ignores signals that it does not handle.
container=$("$docker" run --detach "${restricted[@]}" --env http_proxy=http://127.0.0.1:9 "$image" --device cpu)
trap '"$docker" rm --force "$container" >/dev/null' EXIT
# What Docker runs, here at once: others need systemd for it.
check=$("$docker" inspect --format '{{json .Config.Healthcheck.Test}}' "$container")
readarray -t check < <(python3 -c 'import json, sys; print(*json.loads(sys.argv[1])[1:], sep="\n")' "$check")
for _ in {1..120}; do
  state=$("$docker" inspect --format '{{.State.Status}}' "$container")
  if [ "$state" != running ]; then break; fi
  if "$docker" exec "$container" "${check[@]}" 2>/dev/null; then state=healthy; break; fi
  sleep 2
done
if [ "$state" = healthy ]; then
  "$docker" stop --time 30 "$container" >/dev/null
  state="ended with code $("$docker" inspect --format '{{.State.ExitCode}}' "$container")"
fi
[ "$state" = "ended with code 0" ] || { "$docker" logs "$container" >&2; echo "error: $image: $state" >&2; exit 1; }
echo "$image: healthy, then $state"
