// Every operator without a kernel of its own: the CPU's kernel on aliases.
#pragma once

#include "alias.h"

#include <torch/library.h>

namespace virtual_devices {

using Stack = torch::jit::Stack;

// Where an operator runs: on the device of its tensors, or the one that a factory was asked for.
class Placement {
 public:
  void see(const c10::FunctionSchema& schema, const c10::IValue& value) {
    if (value.isTensor()) {
      see(schema, value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        see(schema, tensor);
      }
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector()) {
        see(schema, tensor.value_or(at::Tensor()));
      }
    } else if (value.isDevice() && value.toDevice().is_privateuseone() && factory_ < 0) {
      factory_ = indexed(value.toDevice());
    }
  }

  int device(const c10::FunctionSchema& schema) const {
    const int device = tensors_ >= 0 ? tensors_ : factory_;
    TORCH_CHECK(device >= 0, schema.name(), " must get a tensor or a device that says where it runs, got none");
    TORCH_CHECK(!on_cpu_, mixed(device, "cpu"));
    return device;
  }

 private:
  void see(const c10::FunctionSchema& schema, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return;
    }
    if (tensor.device().is_privateuseone()) {
      const int device = tensor.device().index();
      TORCH_CHECK(tensors_ < 0 || tensors_ == device, mixed(tensors_, device_of(device).str()));
      tensors_ = device;
    } else if (tensor.device().is_cpu() && tensor.dim() > 0) {
      // As CUDA: numbers may stay on the CPU, and so may indices.
      on_cpu_ |= schema.name().find("index") == std::string::npos;
    }
  }

  static std::string mixed(int one, const std::string& other) {
    return "Expected all tensors to be on the same device, but found at least two devices, " + device_of(one).str() +
        " and " + other + "!";
  }

  int tensors_ = -1;
  int factory_ = -1;
  bool on_cpu_ = false;
};

inline at::Generator numbers_of(const c10::IValue& value, int device) {
  const at::Generator generator = value.isNone() ? default_generator(device) : value.toGenerator();
  return generator.device().is_privateuseone() ? generator.get<Generator>()->numbers() : generator;
}

inline bool takes_generator(const c10::Argument& argument) {
  const auto type = argument.type();
  const auto inner = type->cast<c10::OptionalType>();
  return (inner ? inner->getElementType() : type)->kind() == c10::TypeKind::GeneratorType;
}

inline c10::IValue to_cpu(Aliases& aliases, const c10::IValue& value, Blocks& blocks) {
  auto alias = [&](const at::Tensor& tensor) {
    add_block(blocks, tensor);
    return aliases.to_cpu(tensor);
  };
  if (value.isTensor()) {
    return alias(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(alias(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() ? std::optional<at::Tensor>(alias(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().is_privateuseone()) {
    return c10::Device(c10::kCPU);
  }
  return value;
}

inline c10::IValue to_device(Aliases& aliases, const c10::IValue& value, Blocks& blocks) {
  auto ours = [&](const at::Tensor& cpu) {
    at::Tensor tensor = aliases.to_device(cpu);
    add_block(blocks, tensor);
    return tensor;
  };
  if (value.isTensor()) {
    return ours(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(ours(tensor));
    }
    return list;
  }
  return value;
}

inline bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Views compute nothing: they are no kernels.
inline bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (writes(argument)) {
      return false;
    }
  }
  for (const auto& result : schema.returns()) {
    if (result.alias_info() == nullptr) {
      return false;
    }
  }
  return !schema.returns().empty();
}

// The host needs a number, or the size of a result, and waits for it.
inline bool waits(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::dynamic_output_shape)) {
    return true;
  }
  for (const auto& result : op.schema().returns()) {
    const auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) {
      return true;
    }
  }
  return false;
}

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t count = schema.arguments().size();
  const size_t first = stack->size() - count;
  Placement placement;
  for (size_t index = 0; index < count; ++index) {
    placement.see(schema, (*stack)[first + index]);
  }
  const int device = placement.device(schema);
  const bool view = is_view(schema);
  if (!view) {
    jitter();
  }
  const std::string& name = schema.name();
  Record record = kernel_row(name.substr(name.find("::") + 2), device);
  Aliases aliases(device);
  for (size_t index = 0; index < count; ++index) {
    c10::IValue& value = (*stack)[first + index];
    const c10::Argument& argument = schema.arguments()[index];
    value = takes_generator(argument) ? c10::IValue(numbers_of(value, device))
                                      : to_cpu(aliases, value, writes(argument) ? record.writes : record.reads);
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  aliases.update_arguments();
  const size_t results = schema.returns().size();
  Blocks made;
  for (size_t index = stack->size() - results; index < stack->size(); ++index) {
    (*stack)[index] = to_device(aliases, (*stack)[index], made);
  }
  if (view) {
    return;
  }
  for (const int64_t block : made) {
    if (!holds(record.reads, block) && !holds(record.writes, block)) {
      record.writes.push_back(block);
    }
  }
  const int64_t stream = record.stream;
  trace().add(record);
  if (waits(op)) {
    trace_sync(device, stream);
  }
}

} // namespace virtual_devices
