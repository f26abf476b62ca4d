"""Access to the ports of the server, without gRPC and without jax.

- api_keys: the file of API keys, and the check of a call's key
- tls: certificates and keys, checked at the start
- ports: free ports, and addresses in text
"""
