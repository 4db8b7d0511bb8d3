"""A call, once its arguments are checked: its way is chosen, its plan found or made, its kernels started, its gradients handed out."""
