// What an operator's schema and arguments say of a call.
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

inline bool is_number_or_tuple(const c10::Argument& result) {
  const auto kind = result.type()->kind();
  return kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType && kind != c10::TypeKind::OptionalType;
}

// The host needs a number.
inline bool gives_number(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), is_number_or_tuple);
}

inline bool is_mask(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
}

// The host needs the size of a result, which depends on values. Indexing has one only where a mask is an index.
inline bool has_dynamic_size(const c10::OperatorHandle& op, const Stack& stack) {
  if (!op.hasTag(at::Tag::dynamic_output_shape)) {
    return false;
  }
  const c10::IValue& last = stack.back();
  if (op.schema().name() != "aten::index" || !last.isOptionalTensorList()) {
    return true;
  }
  const auto indices = last.toOptionalTensorVector();
  return std::any_of(indices.begin(), indices.end(), [](const auto& index) { return index && is_mask(*index); });
}

// A value with `map` applied to its tensors, and a device replaced.
template <class Map>
c10::IValue mapped(const c10::IValue& value, c10::DeviceType device, Map&& map) {
  if (value.isTensor()) {
    return map(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(map(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() ? std::optional<at::Tensor>(map(*tensor)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().is_privateuseone()) {
    return c10::Device(device);
  }
  return value;
}

} // namespace virtual_devices
