"""The peers, one module each. They run in `.venv-peers`, which has what requirements/peers.txt names."""
