namespace oxytorch {}
