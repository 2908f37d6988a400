// Checking what a custom call was given: types, and shapes whose dimensions agree by name.
//
// Every operand and result is bound as AnyBuffer and checked here, the same on every platform; a
// binding with a type would refuse a buffer by its position alone. A custom call's own header,
// such as ffi/product_operands.h, states the table of docs/design.md with these.
#ifndef JAXFP4_OPERANDS_H_
#define JAXFP4_OPERANDS_H_

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxfp4 {

using AnyBuffer = ::xla::ffi::AnyBuffer;
using AnyResult = ::xla::ffi::Result<AnyBuffer>;

// An operand without elements is absent.
inline bool IsAbsent(const AnyBuffer& buffer) { return buffer.element_count() == 0; }

template <class T>
const T* DataOrNull(const AnyBuffer& buffer) {
  return IsAbsent(buffer) ? nullptr : static_cast<const T*>(buffer.untyped_data());
}

// A dimension of shapes. Unless its size is given, the first buffer that has it fixes it.
struct Dim {
  const char* name;  // null: its size says it all
  int64_t size = -1;
};

// Checks one call's buffers in turn and keeps the first error; later checks then do nothing.
class OperandCheck {
 public:
  using DataType = ::xla::ffi::DataType;
  using Types = std::initializer_list<DataType>;
  using Shape = std::initializer_list<Dim*>;
  using Shapes = std::initializer_list<Shape>;

  static constexpr Types kFloats = {DataType::BF16, DataType::F32};

  explicit OperandCheck(const char* call) : call_(call) {}

  void Is(const char* name, const AnyBuffer& buffer, Types types, Shape shape) {
    IsOneOf(name, buffer, types, {shape});
  }

  // Tries the shapes in order.
  void IsOneOf(const char* name, const AnyBuffer& buffer, Types types, Shapes shapes) {
    if (!ok()) return;
    if (!HasType(buffer, types) || !FitsOne(buffer, shapes)) {
      Refuse(name, buffer, Text(types) + " " + Text(shapes));
    }
  }

  // The same for an operand that may be absent.
  void IsAbsentOr(const char* name, const AnyBuffer& buffer, Types types, Shapes shapes) {
    if (!ok()) return;
    if (!HasType(buffer, types) || !(IsAbsent(buffer) || FitsOne(buffer, shapes))) {
      Refuse(name, buffer, Text(types) + " " + Text(shapes) + " or absent");
    }
  }

  void MustBeAbsent(const char* name, const AnyBuffer& buffer, DataType type) {
    if (!ok()) return;
    if (!HasType(buffer, {type}) || !IsAbsent(buffer)) {
      Refuse(name, buffer, std::string("an absent ") + TypeName(type));
    }
  }

  // A u8 vector of `bytes` bytes or more.
  void HasRoom(const char* name, const AnyBuffer& buffer, int64_t bytes) {
    if (!ok()) return;
    if (!HasType(buffer, {DataType::U8}) || buffer.dimensions().size() != 1 ||
        buffer.dimensions()[0] < bytes) {
      Refuse(name, buffer, "u8 [n], n at least " + std::to_string(bytes));
    }
  }

  bool ok() const { return !error_.has_value(); }

  // The buffer's own type and shape are fine, but not its part in the call.
  void Refuse(const char* name, const AnyBuffer& buffer, const std::string& legal) {
    Refuse(std::string(name) + " is " + Text(buffer) + "; it must be " + legal);
  }

  void Refuse(const std::string& message) {
    if (!ok()) return;
    error_ = ::xla::ffi::Error::InvalidArgument(std::string(call_) + ": " + message);
  }

  // `value`, or the error.
  template <class T>
  ::xla::ffi::ErrorOr<T> Finish(T value) {
    if (!ok()) return ::xla::ffi::Unexpected(*std::move(error_));
    return value;
  }

 private:
  static bool HasType(const AnyBuffer& buffer, Types types) {
    for (const DataType type : types) {
      if (buffer.element_type() == type) return true;
    }
    return false;
  }

  static bool FitsOne(const AnyBuffer& buffer, Shapes shapes) {
    const auto sizes = buffer.dimensions();
    for (const Shape& shape : shapes) {
      if (shape.size() != sizes.size()) continue;
      bool fits = true;
      const int64_t* size = sizes.begin();
      for (const Dim* dim : shape) {
        fits = fits && (dim->size < 0 || dim->size == *size);
        ++size;
      }
      if (!fits) continue;
      size = sizes.begin();
      for (Dim* dim : shape) dim->size = *size++;
      return true;
    }
    return false;
  }

  static std::string TypeName(DataType type) {
    switch (type) {
      case DataType::PRED:
        return "bool";
      case DataType::U8:
        return "u8";
      case DataType::S8:
        return "s8";
      case DataType::S16:
        return "s16";
      case DataType::S32:
        return "s32";
      case DataType::S64:
        return "s64";
      case DataType::U32:
        return "u32";
      case DataType::F16:
        return "f16";
      case DataType::BF16:
        return "bf16";
      case DataType::F32:
        return "f32";
      case DataType::F64:
        return "f64";
      case DataType::F8E4M3FN:
        return "f8e4m3fn";
      default:
        return "of XLA's type " + std::to_string(static_cast<int>(type));
    }
  }

  static std::string Text(Types types) {
    std::string text;
    for (const DataType type : types) text += (text.empty() ? "" : " or ") + TypeName(type);
    return text;
  }

  static std::string Text(Shapes shapes) {
    std::string text;
    for (const Shape& shape : shapes) {
      text += text.empty() ? "[" : " or [";
      bool first = true;
      for (const Dim* dim : shape) {
        if (!first) text += ", ";
        first = false;
        if (dim->name != nullptr) text += dim->name;
        if (dim->name != nullptr && dim->size >= 0) text += "=";
        if (dim->size >= 0) text += std::to_string(dim->size);
      }
      text += "]";
    }
    return text;
  }

  static std::string Text(const AnyBuffer& buffer) {
    std::string text = TypeName(buffer.element_type()) + " [";
    bool first = true;
    for (const int64_t size : buffer.dimensions()) {
      if (!first) text += ", ";
      first = false;
      text += std::to_string(size);
    }
    return text + "]";
  }

  const char* call_;
  std::optional<::xla::ffi::Error> error_;
};

}  // namespace jaxfp4

#endif  // JAXFP4_OPERANDS_H_
