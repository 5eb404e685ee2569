// The version of pycoll, identical to pyproject.toml and pycoll/__init__.py (a test compares them).
#pragma once

#include <string_view>

namespace pycoll {

inline constexpr std::string_view kVersion = "0.1.0";

}  // namespace pycoll
