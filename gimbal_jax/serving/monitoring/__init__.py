"""The view of operators on a server. Nothing else imports this room, except the server and the command line.

``operators``: HTTP for /metrics, /health, /ready and /dashboard.
``metrics``, ``placement_metrics``, ``request_metrics``: Prometheus metrics of the server, of the placement loop and of
ended requests. ``families`` makes Prometheus families from plain values.
``live``: snapshots for the dashboard and ``gimbal top``. ``live_snapshot`` computes their parts, ``live_format`` has
their types, and ``dashboard.html`` shows them.
``request_log``: a line for each ended request.
``tracing``: OpenTelemetry spans for each ended request.
"""
