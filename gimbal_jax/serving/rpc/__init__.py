"""The gRPC server: its services, and the checks at every call.

- server: ``serve``, the life of the server from start to drain
- listen: the port, its limits, and warnings for the operator
- interceptors: API keys, limits of each client, malformed requests
- engine_service: vllm.grpc.engine.VllmEngine, the protocol of the smg gateway
- control_service: gimbal.v1.Control, the state of the loop
- parsing: checks of every request field, from the message to a ``Generation``
- calls: errors as statuses, log probabilities as messages
- kv_events: changes of the prefix caches as events
- model_files: the files of the checkpoint that clients need
"""
