"""What every rank of our own trainer holds and sends, to the byte and to the call."""
