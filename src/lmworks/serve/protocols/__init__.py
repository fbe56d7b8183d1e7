"""Other APIs over the same chats: each translates its requests to a `ChatRequest`, and pieces of answers back."""
