// PYCOLL_ALGO: the user's rules that choose the algorithm and the protocol of a message.
//
//   rules  = rule { ";" rule } [ ";" ]
//   rule   = [ collective ":" ] choice [ ":" range ]
//   choice = ( algorithm | "auto" ) [ "/" protocol ]
//   range  = size "-" ( size | "max" )
//   size   = digits [ "k" | "m" | "g" ]
//
// A rule without a collective uses that of the rule before it; auto is pycoll's choice. A range
// includes its start and excludes its end; k, m and g are 1024, 1024^2 and 1024^3. Spaces around
// words and the case of k, m and g do not matter. The first rule that matches a message applies. An
// algorithm may be registered in Python, even after the rules are read: it is looked up when it is
// needed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/protocol_kind.h"
#include "schedule/collectives.h"

namespace pycoll {

struct Rule {
  Collective collective;
  std::string algorithm;  // empty: pycoll's choice
  std::optional<ProtocolKind> protocol;
  int64_t first_nbytes = 0;
  int64_t last_nbytes = INT64_MAX;  // not included
  std::string text;                 // as the user wrote it
};

class Rules {
 public:
  Rules() = default;
  /// Raises UsageError that shows the bad piece of `text`. `name` is the name of the variable.
  static Rules parse(std::string_view text, std::string_view name);

  bool empty() const { return rules_.empty(); }
  /// The first matching rule, or null.
  const Rule* find(Collective collective, int64_t nbytes) const;
  /// True when find() returns the same rule for all of [first_nbytes, last_nbytes].
  bool agree_between(Collective collective, int64_t first_nbytes, int64_t last_nbytes) const;

 private:
  std::vector<Rule> rules_;
};

}  // namespace pycoll
