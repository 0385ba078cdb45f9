"""What operators see: metrics, one log line a request, spans of OpenTelemetry."""
