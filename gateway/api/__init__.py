"""The API surfaces: one module an endpoint family, framing and error mapping apart."""
