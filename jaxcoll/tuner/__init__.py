"""The tuner: pure decisions out of telemetry."""
