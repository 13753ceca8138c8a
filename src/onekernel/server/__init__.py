"""The OpenAI-compatible HTTP server: converts requests and answers, computes nothing."""
