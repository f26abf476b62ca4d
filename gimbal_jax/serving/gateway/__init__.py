"""OpenAI's HTTP API: the smg gateway as a child process in front of the server's gRPC port.

- config: settings, keys, checks before the start, and smg's arguments
- gateway: ``Gateway``, which supervises the child
- child: the program of the child
"""
