"""Text around token ids.

- tokenizer: text to token ids and back, and chat templates
- stops: stop strings, found while text streams
- grammar: structured output, the tokens that may come next
- grammar_check: constraints tried in a separate process before the server compiles them
"""
