"""HTTP: one module per resource; errors as problem+json; the OpenAPI document is built from the route table."""
