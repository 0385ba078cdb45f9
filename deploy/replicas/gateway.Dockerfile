# A gateway that sends a prompt to the replica that has most of it: SMG (https://github.com/smg-project/smg).
FROM python:3.12-slim-bookworm
RUN pip install --no-cache-dir smg==1.13.0 && useradd --system --uid 10002 --no-create-home gateway
USER 10002
EXPOSE 30000
ENTRYPOINT ["python", "-m", "smg.launch_router"]
