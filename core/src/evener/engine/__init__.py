"""The engine: requests, state, plans and the steps that run them. Read ``scheduler`` first."""
