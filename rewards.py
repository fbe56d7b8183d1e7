def digits(completions, **columns):
    return [sum(one.isdigit() for one in text) / 8 for text in completions]
