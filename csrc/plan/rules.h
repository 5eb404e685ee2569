// PYCOLL_ALGO: the user's rules for which algorithm and protocol a message gets.
//
//   rules  = rule { ";" rule } [ ";" ]
//   rule   = [ collective ":" ] choice [ ":" range ]
//   choice = ( algorithm | "auto" ) [ "/" protocol ]
//   range  = size "-" ( size | "max" )
//   size   = digits [ "k" | "m" | "g" ]
//
// Without a collective it is that of the rule before; auto is pycoll's choice. A range holds its
// start and not its end; k, m and g are 1024 and its powers. Spaces around words do not matter, nor
// does the case of k, m and g. Of several rules that match a message the first decides. An
// algorithm may be one that is registered in Python, also later: who needs it looks for it.
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
  /// Raises UsageError that shows the offending piece of `text`, which `name` is the name of.
  static Rules parse(std::string_view text, std::string_view name);

  bool empty() const { return rules_.empty(); }
  /// Null: none matches.
  const Rule* find(Collective collective, int64_t nbytes) const;
  /// True when find() gives the same for all of [first_nbytes, last_nbytes].
  bool agree_between(Collective collective, int64_t first_nbytes, int64_t last_nbytes) const;

 private:
  std::vector<Rule> rules_;
};

}  // namespace pycoll
