def train(*a): raise NotImplementedError
