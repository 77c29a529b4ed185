"""Graph backends, recordings, capture strategies and the prepared model."""
