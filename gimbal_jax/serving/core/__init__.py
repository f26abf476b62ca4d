"""The engines of one process behind one thread, without jax.

- core: ``EngineCore``, whose tick plans, enqueues and fetches steps and notifies its subscribers
- inbox: ``Inbox``, new requests and cancellations from other threads, with the limits of the queues
- central_queue: ``CentralQueue``, requests that have no engine yet, under the dispatch policy ``late``
- admission: ``admit``, which dispatches and submits a request for the frontend and the simulator
- status: ``Status``, a snapshot of the server for clients, metrics and tests
"""
