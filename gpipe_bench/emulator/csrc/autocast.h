// Autocast: the operator lists of PyTorch, with kernels that handle arguments of any signature.
#pragma once

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace virtual_devices {

constexpr auto kAutocast = c10::DispatchKey::AutocastPrivateUse1;

inline bool floating(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble &&
      (tensor.is_privateuseone() || tensor.is_cpu());
}

template <class Change>
void change_tensors(torch::jit::Stack* stack, size_t count, Change change) {
  for (size_t index = stack->size() - count; index < stack->size(); ++index) {
    c10::IValue& value = (*stack)[index];
    if (value.isTensor()) {
      value = change(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(change(tensor));
      }
      value = list;
    }
  }
}

inline void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack, at::ScalarType type) {
  c10::impl::ExcludeDispatchKeyGuard below(kAutocast);
  change_tensors(stack, op.schema().arguments().size(), [&](const at::Tensor& tensor) {
    return floating(tensor) ? at::autocast::cached_cast(type, tensor, at::kPrivateUse1) : tensor;
  });
  op.callBoxed(stack);
}

inline void lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_and_call(op, stack, at::autocast::get_autocast_dtype(at::kPrivateUse1));
}

inline void single_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  cast_and_call(op, stack, at::kFloat);
}

// Without a type of its own the operator computes in single precision.
inline void single_by_default(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard below(kAutocast);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t index = 0; index < arguments.size(); ++index) {
    c10::IValue& value = (*stack)[first + index];
    if (arguments[index].name() == "dtype" && value.isNone() && floating((*stack)[first].toTensor())) {
      value = c10::IValue(at::kFloat);
    }
  }
  op.callBoxed(stack);
}

inline void widest(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto type = at::autocast::get_autocast_dtype(at::kPrivateUse1);
  change_tensors(stack, op.schema().arguments().size(), [&](const at::Tensor& tensor) {
    type = floating(tensor) && tensor.scalar_type() == at::kFloat ? at::kFloat : type;
    return tensor;
  });
  cast_and_call(op, stack, type);
}

// The lists say (operator) or (operator, overload).
template <void (*kernel)(const c10::OperatorHandle&, torch::jit::Stack*)>
void autocast(torch::Library& library, std::string name) {
  const size_t comma = name.find(", ");
  if (comma != std::string::npos) {
    name.replace(comma, 2, ".");
  }
  library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<kernel>());
}

} // namespace virtual_devices

#define LOWER_PRECISION(...) virtual_devices::autocast<&virtual_devices::lower_precision>(m, #__VA_ARGS__);
#define SINGLE_PRECISION(...) virtual_devices::autocast<&virtual_devices::single_precision>(m, #__VA_ARGS__);
#define SINGLE_BY_DEFAULT(...) virtual_devices::autocast<&virtual_devices::single_by_default>(m, #__VA_ARGS__);
#define WIDEST(...) virtual_devices::autocast<&virtual_devices::widest>(m, #__VA_ARGS__);
