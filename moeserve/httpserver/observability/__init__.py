"""For operators: metrics, one log line for each request, OpenTelemetry spans."""
