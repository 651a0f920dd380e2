"""A stand-in for the Dynamo operator (component pathway, v1beta1), judged by recordings of the real one."""
