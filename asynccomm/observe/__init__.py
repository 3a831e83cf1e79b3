"""Events, the flight recorder, traces and metrics of comms."""
