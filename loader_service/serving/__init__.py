"""What every gRPC server of the project does with its calls: who may call, and what is told to whom."""
