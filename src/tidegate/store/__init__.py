"""The only SQL: one module and one .sql file per aggregate, and the migrations."""
