"""HTTP: one module per resource; errors as problem+json; the OpenAPI document made from the route table."""
